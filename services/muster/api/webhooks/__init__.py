"""Webhooks: a project's receivers get signed messages about its events, at least once, with a history to look at."""
