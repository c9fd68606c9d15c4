"""The fence: a worker asks whether its attempt is still the current one, before rendezvous and before each commit.

MUSTER_FENCE names where the job's status is told, as a TrainingJob in JSON (`null` for a job that is gone): a file on
this machine (`file:///path`), or `http(s)://…`, where a bearer token is read from MUSTER_FENCE_TOKEN_FILE and a CA from
MUSTER_FENCE_CA_FILE.
"""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from typing import Any

from muster.worker.files import read_regular

SECONDS_MAX = 60.0  # of trying, before the ranks are started
FILE = "file://"
TOKEN_FILE, CA_FILE = "MUSTER_FENCE_TOKEN_FILE", "MUSTER_FENCE_CA_FILE"


class StaleAttempt(Exception):
    """Another attempt is current, or the job is gone: this worker must end without training or committing."""


class FenceUnreachable(OSError):
    """The status could not be read, so nothing is known; retry, and don't commit meanwhile."""


def confirm(fence: str, uid: str, attempt: int) -> None:
    """Return if `attempt` is the current attempt of job `uid`.

    Raises StaleAttempt if it is not, FenceUnreachable if that can't be told.
    """
    current = current_attempt(fence, uid)
    if current is None:
        raise StaleAttempt(f"job {uid} no longer exists, so attempt {attempt} must not go on")
    if current != attempt:
        which = f"attempt {current} is" if current else "none is: it has ended"
        raise StaleAttempt(f"attempt {attempt} of job {uid} is not current: {which}")


def pass_fence(fence: str | None, uid: str, attempt: int) -> None:
    """Return once the fence names our attempt. Raises StaleAttempt; FenceUnreachable after a minute of trying."""
    if fence is None:
        return
    deadline, wait = time.monotonic() + SECONDS_MAX, 0.1
    while True:
        try:
            return confirm(fence, uid, attempt)
        except FenceUnreachable:
            if time.monotonic() + wait > deadline:
                raise
            time.sleep(wait)
            wait = min(2 * wait, 5.0)


def current_attempt(fence: str, uid: str) -> int | None:
    """Return the attempt that lives by the job's status, 0 if its last one is over; None when the job is gone.

    Raises FenceUnreachable.
    """
    try:
        document = _from_file(fence) if fence.startswith(FILE) else _from_http(fence)
        if document is None or document.get("metadata", {}).get("uid", uid) != uid:
            return None
        return _living(document.get("status", {}))
    except (OSError, ValueError) as error:
        raise FenceUnreachable(f"can't read the job's status at {fence}: {error}") from error


def _living(status: dict[str, Any]) -> int:
    """A worker that was created late, after its attempt was closed, must not begin: its nodes may belong to others."""
    attempt = int(status.get("attempt", 0))
    history = status.get("attempts") or [{}]
    over = history[-1].get("number") == attempt and history[-1].get("endedAt") is not None
    return 0 if over else attempt


def _from_file(address: str) -> dict[str, dict[str, Any]] | None:
    document: dict[str, dict[str, Any]] | None = json.loads(read_regular(address[len(FILE) :]))
    return document


def _from_http(url: str) -> dict[str, dict[str, Any]] | None:
    request = urllib.request.Request(url)
    if token_file := os.environ.get(TOKEN_FILE):
        with open(token_file) as file:
            request.add_header("Authorization", f"Bearer {file.read().strip()}")
    try:
        with urllib.request.urlopen(request, timeout=5, context=_tls(url)) as reply:
            document: dict[str, dict[str, Any]] = json.load(reply)
            return document
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _tls(url: str) -> ssl.SSLContext | None:
    if not url.startswith("https"):
        return None
    authority = None
    if ca_file := os.environ.get(CA_FILE):
        with open(ca_file) as file:
            authority = file.read()
    context = ssl.create_default_context(cadata=authority)
    # As muster.kube.tls says: a cluster's own CA is seldom as RFC 5280 wants it, and Python 3.13 would refuse it.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
