"""Verifiers: programs that score what a model wrote."""
