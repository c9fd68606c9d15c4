"""Sign-in by an OpenID Connect provider: whose token it is, and which roles its groups carry."""
