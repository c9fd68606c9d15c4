"""Samples that jobs wrote at their evaluations."""
