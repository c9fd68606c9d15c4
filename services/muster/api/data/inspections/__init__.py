"""Checkpoints: the commits that a job's folder holds."""
