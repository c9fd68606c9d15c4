"""Secrets at rest on one machine: sealed by the API, opened by the operator where a worker starts."""
