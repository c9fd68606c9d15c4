"""Who else tells of a job: Alertmanager and Prometheus. What they say becomes signals; the core judges them."""
