"""Logs: what the workers of each attempt wrote, also after they are gone."""
