"""Reason of a job's phase, and what to do about it."""
