"""The trainer that every rank runs."""
