"""Attempts: the lives of a job's gang."""
