"""The fence: a worker asks whether its attempt, and its own life within it, are still the current ones, before
rendezvous and before each commit.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.worker.files import read_regular
from muster.worker.names import FIRST_INCARNATION

SECONDS_MAX = 60.0  # of trying, before the ranks are started
FILE = "file://"
TOKEN_FILE, CA_FILE = "MUSTER_FENCE_TOKEN_FILE", "MUSTER_FENCE_CA_FILE"


class StaleAttempt(Exception):
    """Another attempt is current, another incarnation of this worker is, or the job is gone: this worker must end
    without training or committing."""


class FenceUnreachable(OSError):
    """The status could not be read, so nothing is known; retry, and don't commit meanwhile."""


@dataclass(frozen=True)
class CurrentGang:
    """The gang that may train by a job's status."""

    attempt: int
    """0 if the last attempt is over."""
    incarnations: tuple[int, ...] = ()
    """The current incarnation of each worker; one that is not listed has its first."""


def confirm(fence: str, uid: str, attempt: int, worker: int, incarnation: int) -> None:
    """Return if `attempt` is the current attempt of job `uid`, and `incarnation` that of its worker.

    Raises StaleAttempt if it is not, FenceUnreachable if that can't be told.
    """
    reason = refusal(current_gang(fence, uid), uid, attempt, worker, incarnation)
    if reason:
        raise StaleAttempt(reason)


def pass_fence(fence: str | None, uid: str, attempt: int, worker: int, incarnation: int) -> None:
    """Return once the fence names our attempt and our life in it. Raises StaleAttempt; FenceUnreachable after a minute
    of trying."""
    if fence is None:
        return
    deadline, wait = time.monotonic() + SECONDS_MAX, 0.1
    while True:
        try:
            return confirm(fence, uid, attempt, worker, incarnation)
        except FenceUnreachable:
            if time.monotonic() + wait > deadline:
                raise
            time.sleep(wait)
            wait = min(2 * wait, 5.0)


def refusal(gang: CurrentGang | None, uid: str, attempt: int, worker: int, incarnation: int) -> str:
    """Return why that worker must end; empty if it belongs to the gang. `gang` is None for a job that is gone."""
    if gang is None:
        return f"job {uid} no longer exists, so attempt {attempt} must not go on"
    if gang.attempt != attempt:
        which = f"attempt {gang.attempt} is" if gang.attempt else "none is: it has ended"
        return f"attempt {attempt} of job {uid} is not current: {which}"
    current = gang.incarnations[worker] if worker < len(gang.incarnations) else FIRST_INCARNATION
    if current != incarnation:
        return (
            f"incarnation {incarnation} of worker {worker} in attempt {attempt} of job {uid} is not current: "
            f"incarnation {current} is"
        )
    return ""


def current_gang(fence: str, uid: str) -> CurrentGang | None:
    """Return the gang that may train by the job's status; None when the job is gone. Raises FenceUnreachable."""
    try:
        document = _from_file(fence) if fence.startswith(FILE) else _from_http(fence)
        if document is None or document.get("metadata", {}).get("uid", uid) != uid:
            return None
        return gang_in(document.get("status", {}))
    except (OSError, ValueError, TypeError) as error:
        raise FenceUnreachable(f"can't read the job's status at {fence}: {error}") from error


def gang_in(status: Mapping[str, Any]) -> CurrentGang:
    """Return the gang that may train by this status. A worker that was created late, after its attempt was closed, must
    not begin: its nodes may belong to others."""
    attempt = int(status.get("attempt", 0))
    history = status.get("attempts") or [{}]
    over = history[-1].get("number") == attempt and history[-1].get("endedAt") is not None
    incarnations = (status.get("gang") or {}).get("incarnations") or ()
    return CurrentGang(0 if over else attempt, tuple(int(each) for each in incarnations))


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
