"""The muster command."""
