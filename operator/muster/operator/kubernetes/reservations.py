"""The reservations: one ConfigMap, written whole by compare-and-swap on its resourceVersion.

Compressed, because a ConfigMap holds at most a mebibyte and 5,000 gangs of eight nodes would fill it uncompressed.
"""

from __future__ import annotations

import base64
import zlib

from pydantic import TypeAdapter, ValidationError

from muster.kube import paths
from muster.kube.client import ApiClient, Object
from muster.kube.errors import ApiError
from muster.operator.core.observed import NodeReservation
from muster.operator.world import ReservationSet, UnreadableDocument, VersionConflict

NAME = "muster-reservations"
_KEY = "entries"
_ENTRIES = TypeAdapter(tuple[NodeReservation, ...])


class ReservationStore:
    """Store of the reservations, in a ConfigMap in `namespace`, which is the operator's own."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self._by_job: dict[str, tuple[NodeReservation, ...]] = {}  # by the job's uid, as last read or written
        self._version = ""

    def of(self, uid: str) -> tuple[NodeReservation, ...]:
        """The job's entries, as last known. A stale grant can't mislead: its number says which request it answers."""
        return self._by_job.get(uid, ())

    async def read(self) -> ReservationSet:
        """Raises UnreadableDocument when it is there and makes no sense."""
        try:
            item = await self._client.get(paths.core(self._namespace, "configmaps", NAME))
        except ApiError as error:
            if error.status != 404:
                raise
            return self._keep((), "")
        version = item["metadata"]["resourceVersion"]
        if version == self._version:
            return ReservationSet(tuple(entry for entries in self._by_job.values() for entry in entries), version)
        return self._keep(_decode(item), version)

    async def write(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        """Write all reservations anew. Raises VersionConflict if somebody else has written since they were read.

        `version` is the one that was read; empty if there was no ConfigMap.
        """
        packed = base64.b64encode(zlib.compress(_ENTRIES.dump_json(entries), 6)).decode()
        body: Object = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": NAME,
                "namespace": self._namespace,
                "labels": {"app.kubernetes.io/managed-by": "muster"},
            },
            "binaryData": {_KEY: packed},
        }
        try:
            if version:
                body["metadata"]["resourceVersion"] = version
                item = await self._client.put(paths.core(self._namespace, "configmaps", NAME), body)
            else:
                item = await self._client.create(paths.core(self._namespace, "configmaps"), body)
        except ApiError as error:
            if error.status in (404, 409):
                raise VersionConflict(f"the reservations changed since they were read: {error}") from error
            raise
        self._keep(entries, item["metadata"]["resourceVersion"])

    def _keep(self, entries: tuple[NodeReservation, ...], version: str) -> ReservationSet:
        by_job: dict[str, list[NodeReservation]] = {}
        for entry in entries:
            by_job.setdefault(entry.uid, []).append(entry)
        self._by_job, self._version = {uid: tuple(mine) for uid, mine in by_job.items()}, version
        return ReservationSet(entries, version)


def _decode(item: Object) -> tuple[NodeReservation, ...]:
    try:
        packed = (item.get("binaryData") or {})[_KEY]
        return _ENTRIES.validate_json(zlib.decompress(base64.b64decode(packed)))
    except (KeyError, ValueError, zlib.error, ValidationError) as error:
        where = f"ConfigMap {item['metadata']['namespace']}/{NAME}"
        raise UnreadableDocument(
            f"{where} can't be understood: {error}. It says which job holds which nodes; "
            "it is made anew from the jobs' statuses if you delete it while no operator runs"
        ) from error
