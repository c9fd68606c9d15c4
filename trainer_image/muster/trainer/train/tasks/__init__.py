"""Objectives of training, one per file."""
