"""Errors of the API server. Both are OSErrors, as are all errors of the network itself."""

from __future__ import annotations


class NoCluster(OSError):
    """No API server is known, or its kubeconfig makes no sense; the message says what was looked at and what to do."""


class ApiError(OSError):
    """The API server refused.

    `status` is HTTP's, and `reason` is Kubernetes' word for it (AlreadyExists, Forbidden, Gone …). `retry_after` is the
    number of seconds for which the server asks to be left alone; 0 if it did not ask.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after
