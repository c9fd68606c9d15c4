"""Objects as an API server would send them, for tests without one."""

from typing import Any

from muster.operator.kubernetes.jobs import CachedJob, JobStore
from muster.recipe.document import JobSpec

JOB_UID = "0f3c2a9e-0000-4000-8000-000000000001"


def job_item(status: dict[str, Any] | None = None, version: int = 7, **spec: Any) -> dict[str, Any]:
    whole = {
        "training": {
            "model": {"preset": "llama-8b"},
            "data": {"train": [{"source": "s3://data/chat.jsonl", "format": "jsonl"}], "sequenceLength": 8192},
            "batch": {"tokensPerStep": 524_288},
            "length": {"steps": 2_000},
            "precision": "bf16",
        },
        "gang": {"nodes": 2, "gpusPerNode": 8, "resources": {"cpu": 90, "memory": "900Gi"}},
        "checkpoint": {"uri": "s3://ckpt/team-nlp"},
        "runtime": {"image": "registry.example/muster-trainer:1"},
    } | spec
    whole = {key: value for key, value in whole.items() if value is not None}
    meta = {
        "name": "llama", "namespace": "team-nlp", "uid": JOB_UID, "resourceVersion": str(version), "generation": 1,
        "creationTimestamp": "2026-11-20T08:00:00Z", "labels": {"kueue.x-k8s.io/queue-name": "research"},
    }  # fmt: skip
    return {"metadata": meta, "spec": whole, "status": status or {}}


def make_job(status: dict[str, Any] | None = None, **spec: Any) -> CachedJob:
    return JobStore(lambda uid: None, JobSpec).keep(job_item(status, **spec))


def pod_item(worker: int = 0, attempt: int = 1, version: int = 1, **changes: Any) -> dict[str, Any]:
    """changes: `meta`, `spec`, `status`, merged into a running pod's."""
    meta = {
        "name": f"llama-{attempt}-{worker}", "namespace": "team-nlp", "uid": f"pod-{attempt}-{worker}",
        "resourceVersion": str(version), "creationTimestamp": "2026-11-20T08:00:10Z",
        "labels": {"muster.dev/job-uid": JOB_UID, "muster.dev/attempt": str(attempt), "muster.dev/worker": str(worker)},
    }  # fmt: skip
    running = {"running": {"startedAt": "2026-11-20T08:00:20Z"}}
    status = {"phase": "Running", "podIP": "10.0.0.7", "containerStatuses": [{"name": "trainer", "state": running}]}
    return {
        "metadata": meta | changes.get("meta", {}),
        "spec": {"nodeName": f"node-{worker}"} | changes.get("spec", {}),
        "status": status | changes.get("status", {}),
    }


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    """A status of a pod whose trainer ended so."""
    state = {"exitCode": code, "reason": reason, "message": message, "finishedAt": "2026-11-20T09:00:00Z"}
    return {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}],
    }


def node_item(name: str = "node-0", ready: str = "True", **changes: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-11-20T07:00:00Z"}
    free = {"cpu": "96", "memory": "1000Gi", "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"muster.dev/pool": "p5"} | changes.get("labels", {}),
        },
        "spec": changes.get("spec", {}),
        "status": {"allocatable": free, "conditions": [condition]},
    }
