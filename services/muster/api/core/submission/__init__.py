"""Submission: from a document to a stored job."""
