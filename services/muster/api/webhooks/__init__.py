"""Webhooks: a project's receivers are told what happens, signed, at least once, with a history to look at."""
