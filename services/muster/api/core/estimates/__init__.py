"""Estimates: what a job would need, take and cost."""
