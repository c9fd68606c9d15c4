"""Shared state of the modules on one machine without Kubernetes: jobs in SQLite, metric pages, states of processes."""
