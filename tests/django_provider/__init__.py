"""An OpenID Connect provider that is not ours: django-oauth-toolkit on Django, a process of its own."""
