"""Replies of the REST API that its client and the command line read, too."""
