"""A pod of the workers' image and service account that asks the checkpoint store, as a worker would."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from muster.cli.examined_cluster import STORE_SECONDS_MAX, ExaminedCluster
from muster.cli.findings import Line, Lines
from muster.storage.settings import platform_variables

POLL_SECONDS = 1.0
# Reasons of Kubernetes for a container that waits (pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go);
# the first two pass by themselves where a registry is busy.
_NO_IMAGE = ("ErrImagePull", "RegistryUnavailable", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_NO_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_HOPELESS = (*_NO_IMAGE[2:], *_NO_START)


def checkpoint_store(examined: ExaminedCluster) -> Lines:
    """The line of the checkpoint store. The pod is removed again, whatever becomes of it."""
    uri = examined.store or examined.settings.get("MUSTER_OPERATOR_CHECKPOINT_URI")
    image = examined.image or examined.settings.get("MUSTER_OPERATOR_IMAGE")
    if not uri or not image:
        lack = "checkpoint store (--store)" if not uri else "worker image (--image)"
        yield "warning", f"not tried: the installation names no {lack}", "give it, or set it in the chart's values"
        return
    core, namespace = examined.api("CoreV1Api"), examined.cluster.namespace
    name = f"muster-doctor-{uuid.uuid4().hex[:8]}"
    examined.ask(
        core.create_namespaced_pod, namespace, probe_pod(name, image, uri, examined.settings, examined.env_from)
    )
    try:
        pod = _wait_for(examined, name)
        ended = pod.status.phase in ("Succeeded", "Failed")
        log = examined.ask(core.read_namespaced_pod_log, name, namespace) if ended else ""
        yield verdict(pod, log or "", image, uri, examined.tolerance)
    finally:
        examined.ask(core.delete_namespaced_pod, name, namespace, grace_period_seconds=0)


def probe_pod(
    name: str, image: str, uri: str, settings: dict[str, str], secrets: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A pod as the restricted Pod Security Standard lets in, with the settings that the operator gives to workers, and
    the variables of these `secrets` as a job has those of its runtime.envFrom.
    """
    given = json.loads(settings.get("MUSTER_OPERATOR_ENV_FROM") or "[]")
    container = {
        "name": "store",
        "image": image,
        "command": ["python", "-m", "muster.trainer.checkpoint", "ls", uri, "--json"],
        "env": [{"name": name, "value": value} for name, value in platform_variables(settings).items()],
        "envFrom": [*given, *({"secretRef": {"name": secret}} for secret in secrets)],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(STORE_SECONDS_MAX) + 30,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    if account := settings.get("MUSTER_OPERATOR_SERVICE_ACCOUNT"):
        spec["serviceAccountName"] = account
    if pull := json.loads(settings.get("MUSTER_OPERATOR_IMAGE_PULL_SECRETS") or "[]"):
        spec["imagePullSecrets"] = [{"name": secret} for secret in pull]
    labels = {"app.kubernetes.io/name": "muster-doctor"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def verdict(pod: Any, log: str, image: str, uri: str, seconds: float) -> Line:
    """Return the pod's verdict on the store after a wait of so many seconds, with its log if it has ended."""
    phase, (reason, message) = pod.status.phase, _waiting(pod)
    if phase == "Succeeded":
        return "ok", f"{uri} answers a pod of {image}"
    if phase == "Failed":
        said = _log_end(log) or pod.status.message or _ended(pod)
        next_step = "check address, bucket policy and the workers' service account (docs/install.md)"
        if "credentials" in said:
            next_step = (
                "give the workers' service account a role, or name the Secret with the keys that jobs use: --env-from "
                "SECRET here, workers.envFrom in the chart for all jobs (docs/install.md)"
            )
        return "failure", f"a pod of {image} can't use {uri}: {said}", next_step
    if reason in _NO_IMAGE:
        next_step = "name one that the nodes can pull with --image, or set workers.imagePullSecrets in the chart"
        return "failure", f"{image} can't be pulled ({reason}{_after(message)})", next_step
    if reason in _NO_START:
        return "failure", f"a pod of {image} can't start ({reason}{_after(message)})", "put right what it names"
    if reason == "Unschedulable":
        next_step = "make room, or try again when a node is there: the pod asks for 100m of CPU and 256Mi of memory"
        return (
            "warning",
            f"not known: no node took the pod that tries it within {seconds:g} s{_after(message)}",
            next_step,
        )
    problem = f"not known: the pod that tries it did not run within {seconds:g} s ({reason or phase}{_after(message)})"
    return "warning", problem, "try again: pulling the image for the first time may take longer"


def _wait_for(examined: ExaminedCluster, name: str) -> Any:
    """The pod when it has ended, can't start, or the time is over."""
    deadline = time.monotonic() + examined.tolerance
    while True:
        pod = examined.ask(examined.api("CoreV1Api").read_namespaced_pod, name, examined.cluster.namespace)
        over = pod.status.phase in ("Succeeded", "Failed") or _waiting(pod)[0] in _HOPELESS
        if over or time.monotonic() > deadline:
            return pod
        time.sleep(POLL_SECONDS)


def _waiting(pod: Any) -> tuple[str, str]:
    """Reason and message of why the pod does not run yet; empty where nothing says so."""
    for status in pod.status.container_statuses or ():
        if status.state.waiting:
            return status.state.waiting.reason or "", status.state.waiting.message or ""
    for condition in pod.status.conditions or ():
        if condition.status != "True" and (condition.reason or condition.message):
            return condition.reason or "", condition.message or ""
    return "", ""


def _ended(pod: Any) -> str:
    ends = [status.state.terminated for status in pod.status.container_statuses or () if status.state.terminated]
    return f"{ends[0].reason}, exit code {ends[0].exit_code}" if ends else str(pod.status.reason or "it failed")


def _log_end(log: str) -> str:
    """The error of the tool's last line, which is a JSON document where the tool itself failed."""
    last = (log.strip().splitlines() or [""])[-1]
    try:
        return str(json.loads(last)["error"])
    except (ValueError, KeyError, TypeError):
        return last


def _after(message: str) -> str:
    return f": {message}" if message else ""
