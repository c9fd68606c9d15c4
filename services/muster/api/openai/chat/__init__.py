"""`/v1/chat/completions` and `/v1/completions`: a commit answers, to be tried out and evaluated. Not for serving."""
