"""Requests and replies: bodies, pages of lists, ranges, streams, and the API's description."""
