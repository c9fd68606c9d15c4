"""Secrets at rest on one machine: encrypted by the API, decrypted by the operator where a worker starts."""
