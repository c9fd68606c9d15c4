"""Sweeps: many jobs of one document, which differ in a few fields, and the best of them."""
