"""What projects used: hours and money of their attempts, kept also when the jobs are deleted."""
