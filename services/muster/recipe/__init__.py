"""Recipe of a training: its configuration, and the job document that carries it.

Pydantic and the standard library only.
"""
