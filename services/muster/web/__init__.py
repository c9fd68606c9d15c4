"""Pages for people, over the same services as the API: what it would refuse, they refuse, and for the same reason."""
