"""Usage of projects: hours and cost of their attempts, kept also when the jobs are deleted."""
