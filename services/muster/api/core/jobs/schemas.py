"""Jobs as REST shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from muster.api.core.database.tables import JobRow
from muster.replies.views import status_view, summary_view
from muster.words.names import API_VERSION, KIND
from muster.words.prices import Prices, bill
from muster.words.redaction import redact_spec, without_env_values
from muster.words.status import Attempt
from muster.words.times import epoch_seconds, rfc3339


def job_document(row: JobRow, prices: Prices, reader: str) -> dict[str, Any]:
    """Job as plain data: it is read and sent often, and its parts were validated when they came in.

    `reader` is the person who sees it.
    """
    spec = row.spec if reader == row.owner else without_env_values(row.spec)
    return {
        "id": row.id,
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": row.name,
            "namespace": row.namespace,
            "project": row.project,
            "owner": row.owner,
            "uid": row.id,
            "labels": row.labels,
            "generation": row.spec_version,
            "creationTimestamp": rfc3339(row.created_at),
            "tags": row.tags.split(),
            "note": row.note,
        },
        "spec": redact_spec(spec),
        "status": status_view(row.status),
        "cost": cost_document(row.status, row.status.get("attempts") or (), prices),
        "handedOver": row.relayed_version >= row.spec_version,
    }


def cost_document(status: dict[str, Any], attempts: Iterable[dict[str, Any]], prices: Prices) -> dict[str, Any]:
    """Bill of these attempts. Those that a newer version wrote in words that we don't know are left out, and said."""
    readable, unknown = [], 0
    for raw in attempts:
        try:
            readable.append(Attempt.model_validate(raw))
        except ValidationError:
            unknown += 1
    made = bill(readable, prices, epoch_seconds((status.get("ledger") or {}).get("since") or 0.0))
    if unknown:
        made = made.model_copy(update={"gaps": (*made.gaps, f"{unknown} attempts that this version can't read")})
    return made.model_dump(mode="json", by_alias=True)


def job_summary(row: JobRow, starts_in: float | None = None) -> dict[str, Any]:
    """A line of the list, of a queued job with the seconds until it is expected to start. The row's phase and end stand
    for the status', which a newer operator may have written."""
    seen = {**row.status, "phase": row.phase, "finishedAt": row.finished_at}
    summary = summary_view(row.id, row.name, row.namespace, row.labels, row.created_at, row.spec, seen)
    own = {"priority": row.priority, "project": row.project, "owner": row.owner}
    return summary | own | {"startsInSeconds": starts_in, "tags": row.tags.split(), "note": row.note}
