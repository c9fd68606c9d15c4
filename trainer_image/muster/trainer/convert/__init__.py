"""What becomes of a commit: files for other tools, a merged model, text."""
