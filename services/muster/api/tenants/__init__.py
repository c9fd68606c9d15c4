"""People and projects: who may do what, with which tokens, secrets and quotas."""
