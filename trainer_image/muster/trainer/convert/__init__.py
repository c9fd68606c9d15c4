"""Conversion of a commit to files for other tools, a merged model, or text."""
