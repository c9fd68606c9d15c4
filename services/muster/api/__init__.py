"""The REST API: jobs go in, their history comes out."""
