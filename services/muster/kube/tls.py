"""TLS towards the API server of a cluster, whose CA is the cluster's own and seldom as RFC 5280 wants it."""

from __future__ import annotations

import ssl


def api_server_context(ca: str | None = None) -> ssl.SSLContext:
    """Check the server's name, its chain and their expiry, but not the form of the certificates.

    `ca` is PEM; None stands for the system's. From Python 3.13 on the default context also sets VERIFY_X509_STRICT, and
    then refuses a CA without a key usage, and certificates without key identifiers: EKS, among others, makes such ones.
    A cluster's CA is handed to us by the cluster itself, so its form says nothing about who signed with it.
    """
    context = ssl.create_default_context(cadata=ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
