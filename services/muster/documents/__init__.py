"""One reader of documents: the same text means the same job by `muster submit`, by REST and by kubectl."""
