"""The operator at home in Kubernetes: the only place that knows it."""
