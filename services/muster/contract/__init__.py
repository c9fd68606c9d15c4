"""The shared words of Muster: job, training configuration, status, signals, commits, names.

Pydantic and the standard library only.
"""
