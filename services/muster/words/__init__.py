"""Words of Muster's programs to each other: job document, status, signals, checkpoints, names.

Pydantic and the standard library only.
"""
