"""A worker's first process, around torchrun: fence, preflight, exit verdict. No module here loads torch."""
