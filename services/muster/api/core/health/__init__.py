"""Health: for load balancers, Kubernetes and Prometheus."""
