"""Events: what happened to a job, append-only, numbered within the job."""
