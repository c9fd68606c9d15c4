"""What the rooms share on one machine without Kubernetes: jobs in an SQLite file, metric pages, states of processes."""
