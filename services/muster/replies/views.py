"""Jobs as REST and the command line show them, made from what is wanted (spec) and what is seen (status), and their
commits. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from muster.recipe.document import JobSpec
from muster.words.base import dump
from muster.words.checkpoint import ITEM_BYTES, Commit
from muster.words.redaction import redact_spec
from muster.words.status import JobStatus
from muster.words.times import rfc3339, rfc3339_or_none

_EMPTY_STATUS: dict[str, Any] = JobStatus().model_dump(mode="json", by_alias=True)

# The keys of a status, of an attempt and of an event's data that hold times.
TIME_KEYS = frozenset((
    "at", "beatAt", "committedAt", "createdAt", "endedAt", "finishedAt", "firstStepAt", "happenedAt", "progressedAt",
    "queuedAt", "retryAt", "since", "startedAt", "until",
))  # fmt: skip


def with_times(document: Any) -> Any:
    """The document with each of its times in RFC 3339, also where an earlier release wrote a number."""
    if isinstance(document, list):
        return [with_times(item) for item in document]
    if not isinstance(document, dict):
        return document
    return {
        key: rfc3339(value) if key in TIME_KEYS and isinstance(value, int | float) else with_times(value)
        for key, value in document.items()
    }


def status_view(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status with every key that this version knows, null where there is nothing, and every key that a newer
    one wrote."""
    return {**_EMPTY_STATUS, **with_times(raw)}


def summary_view(
    job_id: str,
    name: str,
    namespace: str,
    labels: Mapping[str, str],
    created_at: float,
    spec: Mapping[str, Any],
    status: Mapping[str, Any],
) -> dict[str, Any]:
    """A line of the list of jobs. `created_at` is in seconds since the epoch."""
    progress, gang = status.get("progress") or {}, status.get("gang") or {}
    seconds = (status.get("ledger") or {}).get("seconds") or {}
    total = sum(seconds.values())
    return {
        "id": job_id,
        "name": name,
        "namespace": namespace,
        "labels": dict(labels),
        "task": "program" if spec.get("program") else (spec.get("training") or {}).get("task", "pretrain"),
        "phase": status.get("phase", ""),
        "code": status.get("code", ""),
        "because": status.get("because", ""),
        "attempt": status.get("attempt", 0),
        "step": progress.get("step"),
        "steps": progress.get("steps"),
        "loss": progress.get("loss"),
        "evaluationLoss": progress.get("evaluationLoss"),
        "tokensPerSecond": progress.get("tokensPerSecond"),
        "etaSeconds": progress.get("etaSeconds"),
        "restarts": (status.get("restarts") or {}).get("total", 0),
        "checkpointStep": (status.get("checkpoint") or {}).get("step"),
        "wanted": gang.get("wanted", 0),
        "ready": gang.get("ready", 0),
        "suspend": bool(spec.get("suspend")),
        "cancel": bool(spec.get("cancel")),
        "priority": spec.get("priority", 0),
        "createdAt": rfc3339(created_at),
        "startedAt": rfc3339_or_none(status.get("startedAt")),
        "finishedAt": rfc3339_or_none(status.get("finishedAt")),
        "goodput": seconds.get("productive", 0.0) / total if total > 0 else None,
    }


def plan_view(name: str, namespace: str, labels: Mapping[str, str], spec: JobSpec) -> dict[str, Any]:
    """Return the plan of a submission: the resolved job, its sizes and its batch, without refusals and warnings. A
    program's batch is its own affair."""
    training, ranks, sizes = spec.training, spec.gang.ranks_per_node, spec.gang_sizes()
    shape = training.model.shape if training is not None else None
    return {
        "job": {"name": name, "namespace": namespace, "labels": dict(labels), "spec": redact_spec(dump(spec))},
        "parameters": shape.parameters if shape else None,
        "ranksPerNode": ranks,
        "worldSize": {"min": sizes[0] * ranks, "max": sizes[-1] * ranks},
        "accumulation": [
            {"nodes": nodes, "ranks": nodes * ranks, "microSteps": spec.accumulation(nodes)}
            for nodes in (sizes[:256] if training is not None else ())
        ],
        "samplesPerStep": training.samples_per_step() if training is not None else None,
    }


def commit_summary_view(commit: Commit, best: bool) -> dict[str, Any]:
    """A line of the list of a job's commits: the bytes of all its files, of those written for it (`addedBytes`), and
    the metrics that are finite. `best` says whether it is the best of those that are there now."""
    return {
        "step": commit.step,
        "kind": commit.kind,
        "attempt": commit.attempt,
        "committedAt": rfc3339(commit.committed_at),
        "worldSize": commit.world_size,
        "tokens": commit.tokens,
        "metrics": {name: value for name, value in commit.metrics.items() if math.isfinite(value)},
        "best": best,
        "bytes": commit.bytes,
        "addedBytes": commit.added_bytes,
    }


def commit_view(commit: Commit, best: bool) -> dict[str, Any]:
    """Return the contents of a checkpoint: elements of the weights, bytes of all tensors (the optimizer's too), and the
    rest. Of a folder that a program wrote, all of them are 0 or empty, for only its files are known. `best` as for
    `commit_summary_view`."""
    weights = [entry for name, entry in commit.tensors.items() if name.startswith("model/")]
    return commit_summary_view(commit, best) | {
        "job": commit.job,
        "jobUid": commit.job_uid,
        "mesh": commit.mesh,
        "files": [file.model_dump(mode="json", by_alias=True, exclude={"parts"}) for file in commit.files],
        "elements": sum(math.prod(entry.shape) for entry in weights),
        "tensorBytes": sum(math.prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in commit.tensors.values()),
        "tensors": {
            name: {"dtype": entry.dtype, "shape": list(entry.shape), "slices": len(entry.slices)}
            for name, entry in commit.tensors.items()
        },
        "cursor": commit.cursor.model_dump(mode="json", by_alias=True),
        "config": commit.config,
        "architecture": commit.architecture,
        "versions": commit.versions,
    }
