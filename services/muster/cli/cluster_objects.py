"""TrainingJobs, their events and their pods' logs, read and written in a cluster as the person of the kubeconfig."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from muster.cli.cluster_connection import TIMEOUT_SECONDS, NamedCluster, cluster_errors, jobs_arguments
from muster.cli.cluster_views import event_at, id_of
from muster.cli.errors import CliError
from muster.recipe.document import Submission
from muster.words.base import dump
from muster.words.names import FINALIZER, FIRST_INCARNATION, GROUP, KIND, VERSION, Label

PAGE_JOBS = 500
CONTAINER = "trainer"


class ClusterObjects:
    """Objects of one namespace. Every method raises CliError if the cluster refuses the request or does not answer."""

    def __init__(self, cluster: NamedCluster) -> None:
        self.cluster = cluster
        self._names: dict[str, str] = {}  # of the jobs seen so far, by id

    def job(self, name: str) -> dict[str, Any]:
        """The TrainingJob of that name or id. Raises CliError for none."""
        name = self._names.get(name, name)
        try:
            uuid.UUID(name)
        except ValueError:
            from kubernetes.client.exceptions import ApiException

            with self._doing(f"read {name}"):
                try:
                    item: dict[str, Any] = self.cluster.custom().get_namespaced_custom_object(
                        *jobs_arguments(self.cluster), name, _request_timeout=TIMEOUT_SECONDS
                    )
                except ApiException as error:
                    if error.status != 404 or f'"{name}"' not in str(error.body).replace("\\", ""):
                        raise
                    raise self._no_job(name) from None
            self._names[id_of(item)] = name
            return item
        for item in self.jobs(""):
            if name in (id_of(item), item["metadata"]["uid"]):
                self._names[name] = item["metadata"]["name"]
                return item
        raise self._no_job(name)

    def jobs(self, labels: str) -> Iterable[dict[str, Any]]:
        """Yield every TrainingJob of the namespace, read in pages."""
        following = None
        while True:
            with self._doing("list the jobs"):
                page = self.cluster.custom().list_namespaced_custom_object(
                    *jobs_arguments(self.cluster), limit=PAGE_JOBS, label_selector=labels,
                    _request_timeout=TIMEOUT_SECONDS, **({"_continue": following} if following else {}),
                )  # fmt: skip
            yield from page["items"]
            following = page["metadata"].get("continue")
            if not following:
                return

    def create(self, submission: Submission, dry_run: bool) -> dict[str, Any]:
        """Make the TrainingJob; with `dry_run` the cluster only says whether it would."""
        metadata = {"name": submission.name, "labels": dict(submission.labels), "finalizers": [FINALIZER]}
        spec = dump(submission.spec)
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": spec}
        more = {"dry_run": "All"} if dry_run else {}
        with self._doing(f"{'check' if dry_run else 'submit'} {submission.name}"):
            made: dict[str, Any] = self.cluster.custom().create_namespaced_custom_object(
                *jobs_arguments(self.cluster),
                body,
                field_manager="muster-cli",
                _request_timeout=TIMEOUT_SECONDS,
                **more,
            )
        return made

    def change(self, item: dict[str, Any], spec: dict[str, Any], verb: str) -> dict[str, Any]:
        """Change these keys of the job's spec, of that very job: another object of its name is left alone."""
        name, patch = item["metadata"]["name"], {"metadata": {"uid": item["metadata"]["uid"]}, "spec": spec}
        with self._doing(f"{verb} {name}"):
            changed: dict[str, Any] = self.cluster.custom().patch_namespaced_custom_object(
                *jobs_arguments(self.cluster), name, patch, _request_timeout=TIMEOUT_SECONDS
            )
        return changed

    def events(self, item: dict[str, Any]) -> list[Any]:
        """Kubernetes' events of the TrainingJob, oldest first; the cluster keeps them for an hour."""
        selector = f"involvedObject.uid={item['metadata']['uid']}"
        with self._doing(f"read the events of {item['metadata']['name']}"):
            event_list = self.cluster.core().list_namespaced_event(
                self.cluster.namespace, field_selector=selector, _request_timeout=TIMEOUT_SECONDS
            )
        return sorted(event_list.items, key=lambda event: (event_at(event), event.metadata.name))

    def pods(self, item: dict[str, Any], attempt: int) -> dict[int, str]:
        """The names of the attempt's pods, by worker."""
        selector = f"{Label.JOB_UID}={item['metadata']['uid']},{Label.ATTEMPT}={attempt}"
        with self._doing(f"list the pods of {item['metadata']['name']}"):
            pod_list = self.cluster.core().list_namespaced_pod(
                self.cluster.namespace, label_selector=selector, _request_timeout=TIMEOUT_SECONDS
            )
        # Of a worker that was replaced the newest pod comes last, and stays.
        pods = sorted(
            pod_list.items, key=lambda pod: int(pod.metadata.labels.get(Label.INCARNATION, FIRST_INCARNATION))
        )
        return {int(pod.metadata.labels[Label.WORKER]): pod.metadata.name for pod in pods}

    def log(self, job: str, pod: str, tail: int | None) -> str:
        """Return the worker's log so far, or its last lines."""
        more = {"tail_lines": tail} if tail is not None else {}
        with self._doing(f"read the log of {job}"):
            return (
                self.cluster.core().read_namespaced_pod_log(
                    pod, self.cluster.namespace, container=CONTAINER, _request_timeout=TIMEOUT_SECONDS, **more
                )
                or ""
            )

    def open_log(self, pod: str, tail: int | None) -> Any:
        """The worker's log as an open reply, which goes on until the container ends. Raises ApiException."""
        more = {"tail_lines": tail} if tail is not None else {}
        return self.cluster.core().read_namespaced_pod_log(
            pod, self.cluster.namespace, container=CONTAINER, follow=True, _preload_content=False, **more
        )

    def _doing(self, what: str) -> Any:
        return cluster_errors(self.cluster, what)

    def _no_job(self, name: str) -> CliError:
        where = f"namespace {self.cluster.namespace!r} of context {self.cluster.context!r}"
        next_step = f"`muster --context {self.cluster.context} ls` lists the jobs; --namespace looks elsewhere"
        return CliError(f"there is no job {name!r} in {where}", code="job_not_found", next_step=next_step)
