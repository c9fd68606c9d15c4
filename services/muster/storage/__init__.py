"""Folders and objects wherever they lie: one `Store` over file systems, S3 and the web."""
