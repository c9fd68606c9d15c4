"""Muster's tests. A regular package, so that an installed distribution's stray `tests` never shadows it."""
