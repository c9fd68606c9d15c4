"""Further sources of signals about a job: Alertmanager and Prometheus. The core decides what follows from them."""
