"""Tokens: who may ask, and for what."""
