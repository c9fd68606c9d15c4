"""Jobs as REST shows and takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from muster.api.core.database.tables import JobRow
from muster.api.core.submission.drafts import Draft
from muster.contract.base import Problem
from muster.contract.names import KIND
from muster.contract.prices import Prices, bill
from muster.contract.redaction import redact_spec, without_env_values
from muster.contract.replies import API_VERSION
from muster.contract.spec import JobSpec
from muster.contract.status import Attempt
from muster.contract.times import epoch_seconds, rfc3339
from muster.contract.views import plan_view, status_view, summary_view


class DocumentMetadata(BaseModel):
    """Other keys of Kubernetes' ObjectMeta are allowed and ignored."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        pattern=r"^[a-z]([-a-z0-9]{0,46}[a-z0-9])?$", description="Unique among the live jobs of a namespace."
    )
    namespace: str | None = Field(default="default", pattern=r"^[a-z]([-a-z0-9]{0,46}[a-z0-9])?$")
    labels: dict[str, str] | None = Field(default={}, max_length=64)


class JobDocument(BaseModel):
    """Body of POST /jobs: the whole TrainingJob, as for `kubectl apply`. Parsed by contract.spec.parse_job."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")

    api_version: str = Field(default=API_VERSION, pattern=f"^{API_VERSION}$")
    kind: str = Field(default=KIND, pattern=f"^{KIND}$")
    metadata: DocumentMetadata
    spec: JobSpec
    status: Any = Field(default=None, description="Ignored.")


class CloneRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(default=None, description="The new job's name; left out: `<name>-2`, `-3` …")
    spec: dict[str, Any] | None = Field(
        default=None, description="Changes, as a JSON merge patch (RFC 7396) on the spec."
    )


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
        },
        "spec": redact_spec(spec),
        "status": status_view(row.status),
        "cost": cost_document(row.status, row.status.get("attempts") or (), prices),
        "handedOver": row.relayed_version >= row.spec_version,
    }


def cost_document(status: dict[str, Any], attempts: Iterable[dict[str, Any]], prices: Prices) -> dict[str, Any]:
    """Bill of these attempts. Those that a newer version wrote in words that we don't know are left out, and said."""
    known, unknown = [], 0
    for raw in attempts:
        try:
            known.append(Attempt.model_validate(raw))
        except ValidationError:
            unknown += 1
    made = bill(known, prices, epoch_seconds((status.get("ledger") or {}).get("since") or 0.0))
    if unknown:
        made = made.model_copy(update={"gaps": (*made.gaps, f"{unknown} attempts that this version can't read")})
    return made.model_dump(mode="json", by_alias=True)


def job_summary(row: JobRow) -> dict[str, Any]:
    """A line of the list. The row's phase and end stand for the status', which a newer operator may have written."""
    seen = {**row.status, "phase": row.phase, "finishedAt": row.finished_at}
    summary = summary_view(row.id, row.name, row.namespace, row.labels, row.created_at, row.spec, seen)
    return summary | {"priority": row.priority, "project": row.project, "owner": row.owner}


def plan_document(draft: Draft, refusals: list[dict[str, str]], admission: dict[str, Any] | None) -> dict[str, Any]:
    view = plan_view(draft.name, draft.namespace, draft.labels, draft.spec)
    view["job"]["project"] = draft.project
    return {
        "accepted": not refusals,
        **view,
        "admission": admission,
        "refusals": refusals,
        "warnings": [finding("warning", problem) for problem in draft.warnings],
    }


def finding(code: str, problem: Problem) -> dict[str, str]:
    return {"code": code, "path": problem.path, "message": problem.message}
