"""One operator at a time, by a Lease. Losing it ends the process: whoever is not sure to lead must not act.

The lease spares work and confusion; it is no fence. Statuses are written by compare-and-swap and workers confirm their
attempt themselves, so two leaders for a moment can't start two gangs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from muster.kube import paths
from muster.kube.client import ApiClient, Object
from muster.kube.errors import ApiError

NAME = "muster-operator"
# Long enough for an API server that has too much to do. Workers need no operator meanwhile, and one that is told to
# stop hands the lease over at once.
LEASE_SECONDS = 30
RENEW_SECONDS = 3.0
RETRY_SECONDS = 1.0
TRY_SECONDS = 5.0
GIVE_UP_SECONDS = 15.0  # without a renewal; well before another may take the lease
UNREADY_SECONDS = 30.0  # without an answer about the lease; a waiting operator asks every second, a leader every third
WARN_SECONDS = 60.0  # a trouble that lasts is logged again so often
_API = "coordination.k8s.io/v1"


class LeadershipLost(Exception):
    """Error that another operator leads, or that our lead could not be renewed at the API server in time."""


class LeaseReadiness:
    """State of the lease: whether the API server answers about it. Otherwise an operator neither leads nor waits to.

    Read by /readyz from another thread.
    """

    def __init__(self) -> None:
        self._answered_at = float("-inf")
        self._trouble = "it has not answered yet"

    def answered(self) -> None:
        self._answered_at = time.monotonic()

    def failed(self, error: OSError) -> None:
        self._trouble = str(error) or type(error).__name__

    def problem(self) -> str:
        """The reason for which this operator is not ready; empty where it is."""
        if time.monotonic() - self._answered_at <= UNREADY_SECONDS:
            return ""
        return f"the API server does not let us read or renew our lease: {self._trouble}"


class LeaderElection:
    """The lease that lets one operator at a time lead.

    `identity` says who we are and is unique per process. `waiting` is called with who leads instead, whenever that
    changes; `troubled`, that the API server did not let us ask, whenever the reason changes and once a minute while it
    lasts.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        identity: str,
        waiting: Callable[[str], None] = lambda holder: None,
        troubled: Callable[[OSError], None] = lambda error: None,
        readiness: LeaseReadiness | None = None,
    ) -> None:
        self._client, self._namespace, self.identity = client, namespace, identity
        self._waiting, self._troubled, self._readiness = waiting, troubled, readiness or LeaseReadiness()
        self._path = paths.group(_API, namespace, "leases", NAME)
        self._lease: Object | None = None
        self._seen: tuple[str, float] = ("", 0.0)  # the other's last sign, and when we saw it, by our own clock

    async def acquire(self) -> None:
        """Return when we lead."""
        reported, trouble, warned_at = "", "", 0.0
        while True:
            try:
                leads = await self._try()
            except OSError as error:
                self._readiness.failed(error)
                if (text := str(error)) != trouble or time.monotonic() - warned_at > WARN_SECONDS:
                    trouble, warned_at = text, time.monotonic()
                    self._troubled(error)
            else:
                self._readiness.answered()
                if leads:
                    return
                trouble = ""
            holder = self._holder()
            if holder != reported:
                reported = holder
                self._waiting(holder)
            await asyncio.sleep(RENEW_SECONDS / 3)

    async def hold(self) -> None:
        """Renew for ever. Raises LeadershipLost."""
        renewed, pause = time.monotonic(), RENEW_SECONDS
        while True:
            await asyncio.sleep(pause)
            if time.monotonic() - renewed > LEASE_SECONDS:
                raise LeadershipLost("this process stood still for longer than its lease")
            try:
                async with asyncio.timeout(TRY_SECONDS):  # not wait_for: until 3.12 it swallows cancellations
                    await self._renew()
                renewed, pause = time.monotonic(), RENEW_SECONDS
                self._readiness.answered()
            except OSError as error:
                self._readiness.failed(error)
                pause = RETRY_SECONDS
                if (seconds := time.monotonic() - renewed) > GIVE_UP_SECONDS:
                    raise LeadershipLost(f"the lease could not be renewed for {seconds:.0f} s: {error!r}") from error

    async def release(self) -> None:
        """Let the next one lead at once. Best effort."""
        if self._lease is None or self._lease["spec"].get("holderIdentity") != self.identity:
            return
        try:
            async with asyncio.timeout(2.0):
                await self._write(self._lease, holder="")
        except OSError:
            pass

    async def _try(self) -> bool:
        try:
            self._lease = await self._client.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            body = self._body({"metadata": {"name": NAME, "namespace": self._namespace}}, self.identity)
            try:
                self._lease = await self._client.create(paths.group(_API, self._namespace, "leases"), body)
            except ApiError as taken:
                if taken.reason != "AlreadyExists":
                    raise
                return False
            return True
        spec = self._lease["spec"]
        if spec.get("holderIdentity") not in ("", None, self.identity) and not self._expired(self._lease):
            return False
        try:
            await self._write(self._lease, self.identity)
        except ApiError as error:
            if error.status != 409:
                raise
            return False
        return True

    def _expired(self, lease: Object) -> bool:
        """Return whether there was no sign of the holder for the lease's time, by our clock alone: clocks of two
        machines may differ."""
        version, now = lease["metadata"]["resourceVersion"], time.monotonic()
        if self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] > float(lease["spec"].get("leaseDurationSeconds") or LEASE_SECONDS)

    async def _renew(self) -> None:
        assert self._lease is not None, "renewed before it was acquired"
        try:
            await self._write(self._lease, self.identity)
        except ApiError as error:
            if error.status != 409:
                raise
            self._lease = await self._client.get(self._path)
            if self._holder() != self.identity:
                raise LeadershipLost("another operator has taken the lease") from error
            await self._write(self._lease, self.identity)  # the answer to an earlier renewal was lost

    async def _write(self, lease: Object, holder: str) -> None:
        self._lease = await self._client.put(self._path, self._body(lease, holder))

    def _body(self, lease: Object, holder: str) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = lease.get("spec") or {}
        changed = before.get("holderIdentity") != holder
        spec = before | {
            "holderIdentity": holder,
            "leaseDurationSeconds": LEASE_SECONDS if holder else 1,
            "renewTime": now,
            "acquireTime": now if changed else before.get("acquireTime", now),
            "leaseTransitions": int(before.get("leaseTransitions", 0)) + (1 if changed and holder else 0),
        }
        return {"apiVersion": _API, "kind": "Lease", "metadata": lease["metadata"], "spec": spec}

    def _holder(self) -> str:
        return str((self._lease or {}).get("spec", {}).get("holderIdentity") or "")
