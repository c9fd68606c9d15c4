"""Metrics: the steps of all attempts as one history."""
