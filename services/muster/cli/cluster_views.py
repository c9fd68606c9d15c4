"""API documents of jobs, made from a cluster's TrainingJobs and Kubernetes events."""

from __future__ import annotations

from typing import Any

from muster.plan.advice import advice, unreadable
from muster.replies.views import status_view, summary_view
from muster.words.names import Label
from muster.words.redaction import redact_spec
from muster.words.status import JobStatus
from muster.words.times import epoch_seconds, rfc3339


def id_of(item: dict[str, Any]) -> str:
    """The id under which the API knows the job, if it made it; else the object's own."""
    return str((item["metadata"].get("labels") or {}).get(Label.JOB_ID) or item["metadata"]["uid"])


def created_at(item: dict[str, Any]) -> float:
    return epoch_seconds(item["metadata"]["creationTimestamp"])


def status_of(item: dict[str, Any]) -> dict[str, Any]:
    """The status; of a job that no operator has looked at yet, the beginning of one."""
    at = item["metadata"]["creationTimestamp"]
    beginning = {"phase": "Queued", "queuedAt": at, "since": at, "because": "no operator has looked at it yet"}
    return status_view(item.get("status") or beginning)


def job_view(item: dict[str, Any]) -> dict[str, Any]:
    metadata = item["metadata"]
    return {
        "id": id_of(item),
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "labels": metadata.get("labels") or {},
            "generation": metadata.get("generation", 1),
            "creationTimestamp": rfc3339(created_at(item)),
        },
        "spec": redact_spec(item["spec"]),
        "status": status_of(item),
    }


def summary_of(item: dict[str, Any]) -> dict[str, Any]:
    metadata = item["metadata"]
    labels, at = metadata.get("labels") or {}, created_at(item)
    spec = item.get("spec") or {}
    return summary_view(id_of(item), metadata["name"], metadata["namespace"], labels, at, spec, status_of(item))


def why_view(item: dict[str, Any]) -> dict[str, Any]:
    status, spec = status_of(item), item.get("spec") or {}
    suspend, cancel = bool(spec.get("suspend")), bool(spec.get("cancel"))
    try:
        job_status = JobStatus.model_validate(item.get("status") or {})
        folder = job_status.checkpoint.uri if job_status.checkpoint else ""
        flags = {"suspend": suspend, "cancel": cancel, "handed_over": True}
        steps = advice(job_status, **flags, ahead=0, spec=spec, name=item["metadata"]["name"], folder=folder)
    except ValueError:
        steps = unreadable(status)
    keys = ("phase", "code", "because", "since", "attempt", "lastFailure", "retryAt", "restarts")
    answer = {key: status.get(key) for key in keys}
    return {"id": id_of(item), "name": item["metadata"]["name"], "queue": None, **answer, "next": steps}


def event_at(event: Any) -> float:
    at = event.event_time or event.last_timestamp or event.metadata.creation_timestamp
    return float(at.timestamp())


def event_view(number: int, event: Any, item: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": number,
        "jobId": id_of(item),
        "type": event.reason or "",
        "at": rfc3339(event_at(event)),
        "attempt": None,
        "message": event.message or "",
        "data": {"kind": event.type},
    }
