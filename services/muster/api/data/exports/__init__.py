"""Exports: models that are made of commits and fetched."""
