"""Evaluations: programs that are run once for each checkpoint of another job."""
