"""A worker's first process, around its ranks: fence, preflight, exit verdict. No module here loads torch."""
