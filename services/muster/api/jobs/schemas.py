"""Jobs as REST shows and takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from muster.api.jobs.submission import Draft
from muster.api.reply import Reply
from muster.api.tables import JobRow
from muster.contract.base import Problem, Time
from muster.contract.names import GROUP, KIND, VERSION
from muster.contract.prices import Bill, Prices, bill
from muster.contract.redaction import redact_spec, without_env_values
from muster.contract.spec import JobSpec
from muster.contract.status import Attempt, JobStatus
from muster.contract.times import epoch_seconds, rfc3339
from muster.contract.views import plan_view, status_view, summary_view

API_VERSION = f"{GROUP}/{VERSION}"


class DocumentMetadata(BaseModel):
    """Other keys of Kubernetes' ObjectMeta are allowed and ignored."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        pattern=r"^[a-z]([-a-z0-9]{0,46}[a-z0-9])?$", description="Unique among the live jobs of a namespace."
    )
    namespace: str | None = Field(default="default", pattern=r"^[a-z]([-a-z0-9]{0,46}[a-z0-9])?$")
    labels: dict[str, str] | None = Field(default={}, max_length=64)


class JobDocument(BaseModel):
    """What POST /jobs takes: the whole TrainingJob, as `kubectl apply` would. Parsed by contract.spec.parse_job."""

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


class JobMetadata(Reply):
    """generation moves with each change of the spec."""

    name: str
    namespace: str
    project: str
    owner: str
    uid: str
    labels: dict[str, str]
    generation: int
    creation_timestamp: Time


class Job(Reply):
    """A job. Its spec has all defaults, and shows values of secret-looking variables, and to everybody but its owner
    those of all variables, as ***. `cost` is that of the
    attempts in the status, as far as its ledger is closed. `handed_over` says that the cluster has the job."""

    id: str
    api_version: str = API_VERSION
    kind: str = KIND
    metadata: JobMetadata
    spec: JobSpec
    status: JobStatus
    cost: Bill
    handed_over: bool


class JobSummary(Reply):
    """A line of the list. `goodput` is the productive share of the seconds so far."""

    id: str
    name: str
    namespace: str
    project: str
    owner: str
    labels: dict[str, str]
    task: str
    phase: str
    code: str
    because: str
    attempt: int
    step: int | None
    steps: int | None
    loss: float | None
    evaluation_loss: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    restarts: int
    checkpoint_step: int | None
    wanted: int
    ready: int
    suspend: bool
    cancel: bool
    priority: int
    created_at: Time
    started_at: Time | None
    finished_at: Time | None
    goodput: float | None


class JobList(Reply):
    """`next_cursor` asks for the next page; it is null on the last."""

    items: list[JobSummary]
    next_cursor: str | None


class PlannedJob(Reply):
    name: str
    namespace: str
    project: str
    labels: dict[str, str]
    spec: JobSpec


class Finding(Reply):
    code: str
    path: str
    message: str


class Accumulation(Reply):
    """On so many nodes an optimizer step takes `micro_steps` forward and backward passes."""

    nodes: int
    ranks: int
    micro_steps: int


class Range(Reply):
    min: int
    max: int


class Plan(Reply):
    """What a submission would do. `parameters` is null where the model's shape comes from a commit or a folder."""

    accepted: bool
    job: PlannedJob
    parameters: int | None
    ranks_per_node: int
    world_size: Range
    accumulation: list[Accumulation]
    samples_per_step: int
    refusals: list[Finding]
    warnings: list[Finding]


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


def plan_document(draft: Draft, refusals: list[dict[str, str]]) -> dict[str, Any]:
    view = plan_view(draft.name, draft.namespace, draft.labels, draft.spec)
    view["job"]["project"] = draft.project
    return {
        "accepted": not refusals,
        **view,
        "refusals": refusals,
        "warnings": [finding("warning", problem) for problem in draft.warnings],
    }


def finding(code: str, problem: Problem) -> dict[str, str]:
    return {"code": code, "path": problem.path, "message": problem.message}
