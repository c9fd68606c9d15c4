"""The questions that the API answers, answered by a cluster without one (`muster --context NAME`).

TrainingJobs, their Kubernetes events and their pods' logs are read and written as the person of the kubeconfig. What
only the API keeps (metrics, the history of jobs that are gone, checkpoints' lists) is refused with the reason.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from muster.cli.cluster_connection import TIMEOUT_SECONDS, Cluster, cluster_errors, jobs_arguments
from muster.cli.cluster_views import event_at, event_view, id_of, job_view, status_of, summary_of, why_view
from muster.cli.errors import CliError, Exit, Fault, usage
from muster.contract.base import InvalidDocument, Problem, dump
from muster.contract.names import FINALIZER, GROUP, KIND, VERSION, Label
from muster.contract.spec import Submission, parse_job
from muster.contract.status import Phase
from muster.contract.text import nearest
from muster.contract.views import plan_view, status_view

PAGE_JOBS = 500
POLL_SECONDS = 1.0
CONTAINER = "trainer"
_ENDED = {str(phase) for phase in Phase if phase.terminal}


@dataclass(frozen=True)
class StreamEvent:
    """As a server-sent event: what kind of news, and its JSON."""

    event: str
    data: str
    id: str = ""


@dataclass(frozen=True)
class Place:
    """What stands for the server's address. local: no path of this machine means anything there."""

    url: str
    local: bool = False


class ClusterClient:
    """One namespace of one cluster. Use as a context manager, or close it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.server = Place(f"context {cluster.context}")
        self._names: dict[str, str] = {}  # of the jobs seen so far, by id

    def __enter__(self) -> ClusterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.cluster.close()

    # --- the questions of the API ---

    def get(self, path: str, **params: Any) -> Any:
        """path: `jobs/NAME`, or `jobs/NAME/QUESTION`."""
        _, _, rest = path.partition("/")
        name, _, question = rest.partition("/")
        answers: dict[str, Callable[..., Any]] = {
            "": job_view,
            "attempts": lambda item: {"items": status_view(item.get("status") or {})["attempts"], "cost": None},
            "metrics": lambda item, **_: {"points": [], "evaluations": []},
            "events": self._events,
            "why": why_view,
            "logs": self._log,
        }
        if not path.startswith("jobs/") or question not in answers:
            raise self._needs_api(path)
        return answers[question](self._object(name), **params)

    def post(self, path: str, body: Any = None, key: str | None = None, repeat: bool = True, **params: Any) -> Any:
        name, _, verb = path.removeprefix("jobs/").partition(":")
        changes = {"cancel": {"cancel": True}, "suspend": {"suspend": True}, "resume": {"suspend": False}}
        if verb not in changes:
            raise self._needs_api(path)
        item = self._object(name)
        status = status_of(item)
        if status["phase"] in _ENDED and not (verb == "cancel" and status["phase"] == Phase.CANCELLED):
            raise CliError(
                f"{item['metadata']['name']} has ended ({status['phase']}), so it can't {verb}", code="job_finished"
            )
        if verb == "resume" and item["spec"].get("cancel"):
            raise CliError(f"{item['metadata']['name']} is being cancelled, so it can't resume", code="job_cancelling")
        # With the uid, so that another object of that name is never changed.
        patch = {"metadata": {"uid": item["metadata"]["uid"]}, "spec": changes[verb]}
        with self._doing(f"{verb} {name}"):
            changed = self.cluster.custom().patch_namespaced_custom_object(
                *jobs_arguments(self.cluster), item["metadata"]["name"], patch, _request_timeout=TIMEOUT_SECONDS
            )
        return job_view(changed)

    def delete(self, path: str) -> None:
        raise self._needs_api(path)

    def job_id(self, name: str) -> str:
        """The id of the job of that name or id. Raises CliError for none."""
        return id_of(self._object(name))

    def job_pages(self, limit: int, **filters: Any) -> Iterator[list[dict[str, Any]]]:
        """The newest `limit` jobs, newest first: a cluster lists by name, so all are read before the first is given."""
        phases = filters.get("phase") or []
        for word in phases:
            if word not in {str(phase) for phase in Phase}:
                problem = Problem("--phase", f"{word!r} is not one of {', '.join(Phase)}", nearest(word, Phase))
                raise CliError(str(problem), Exit.USAGE, "invalid_parameter", faults=(Fault(problem),))
        found = [
            summary
            for item in self._objects(",".join(filters.get("label") or []))
            if (summary := summary_of(item))
            and (not phases or summary["phase"] in phases)
            and (not filters.get("live") or summary["phase"] not in _ENDED)
            and filters.get("name") in (None, summary["name"])
        ]
        found.sort(key=lambda summary: summary["createdAt"], reverse=True)
        for start in range(0, min(limit, len(found)), PAGE_JOBS):
            yield found[start : min(start + PAGE_JOBS, limit)]

    def plan(self, document: Any) -> dict[str, Any]:
        """The cluster's own dry run: its schema, its policies and its quotas are asked, and nothing is stored."""
        submission = self._parsed(document)
        self._create(submission, dry_run=True)
        plan = plan_view(submission.name, self.cluster.namespace, submission.labels, submission.spec)
        return {"accepted": True, **plan, "refusals": [], "warnings": []}

    def submit(self, document: Any) -> dict[str, Any]:
        return job_view(self._create(self._parsed(document), dry_run=False))

    def stream(self, path: str, last_id: str = "", **params: Any) -> Iterator[StreamEvent]:
        """Events or log lines until the job ends."""
        name, _, question = path.removeprefix("jobs/").partition("/")
        if question == "events":
            return self._follow_events(name, int(last_id or 0), params.get("type") or [])
        return self._follow_logs(name, params)

    # --- submission ---

    def _parsed(self, document: Any) -> Submission:
        try:
            submission = parse_job(document)
        except InvalidDocument as invalid:
            faults = tuple(Fault(problem) for problem in invalid.problems)
            what = f"the job is not valid: {invalid.count} problem{'' if invalid.count == 1 else 's'}"
            raise CliError(what, Exit.USAGE, "invalid_job", faults=faults) from None
        if submission.namespace not in (None, self.cluster.namespace):
            raise usage(
                f"the file names namespace {submission.namespace!r}, and the context's is {self.cluster.namespace!r}",
                f"muster --context {self.cluster.context} --namespace {submission.namespace} submit …",
                "other-namespace",
            )
        return self._with_folder(submission)

    def _with_folder(self, submission: Submission) -> Submission:
        """`from: {job: NAME}` as the folder of that job's commits, as the API does it."""
        source = submission.spec.training.model.from_
        if source is None or source.job is None or source.uri is not None:
            return submission
        checkpoint = status_of(self._object(source.job)).get("checkpoint")
        if not checkpoint:
            problem = Problem("spec.training.model.from.job", f"job {source.job!r} has no commit yet")
            raise CliError(str(problem), Exit.USAGE, "invalid_job", faults=(Fault(problem),))
        model = submission.spec.training.model
        model = model.model_copy(update={"from_": source.model_copy(update={"uri": checkpoint["uri"]})})
        training = submission.spec.training.model_copy(update={"model": model})
        return submission.model_copy(update={"spec": submission.spec.model_copy(update={"training": training})})

    def _create(self, submission: Submission, dry_run: bool) -> dict[str, Any]:
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

    # --- events ---

    def _events(self, item: dict[str, Any], after: int = 0, limit: int = 500, **filters: Any) -> dict[str, Any]:
        """Kubernetes' events of the TrainingJob, oldest first; the cluster keeps them for an hour."""
        selector = f"involvedObject.uid={item['metadata']['uid']}"
        with self._doing(f"read the events of {item['metadata']['name']}"):
            found = self.cluster.core().list_namespaced_event(
                self.cluster.namespace, field_selector=selector, _request_timeout=TIMEOUT_SECONDS
            )
        told = sorted(found.items, key=lambda event: (event_at(event), event.metadata.name))
        kinds = filters.get("type") or []
        events = [event_view(number, event, item) for number, event in enumerate(told, 1)]
        chosen = [event for event in events if event["id"] > after and (not kinds or event["type"] in kinds)][:limit]
        return {"items": chosen, "lastId": chosen[-1]["id"] if chosen else after}

    def _follow_events(self, name: str, after: int, kinds: list[str]) -> Iterator[StreamEvent]:
        while True:
            item = self._object(name)  # before the events: what the job says has its event by then
            for event in self._events(item, after)["items"]:
                after = event["id"]
                if not kinds or event["type"] in kinds:
                    yield StreamEvent(event["type"], json.dumps(event), str(after))
            if (phase := status_of(item)["phase"]) in _ENDED:
                yield StreamEvent("end", json.dumps({"phase": phase}))
                return
            time.sleep(POLL_SECONDS)

    # --- logs ---

    def _log(
        self,
        item: dict[str, Any],
        attempt: int | None = None,
        worker: int | str = 0,
        tail: int | None = None,
        offset: int = 0,
    ) -> dict[str, Any]:
        """The log of a worker whose pod is still there: a cluster keeps no others."""
        name, status = item["metadata"]["name"], status_of(item)
        pods = self._pods(item, attempt or status["attempt"])
        if int(worker) not in pods:
            raise CliError(
                f"{name} has no pod of worker {worker} in attempt {attempt or status['attempt']}: a cluster has "
                "the logs of pods that are there, and Muster's API keeps the others",
                code="log_not_found",
                next_step=f"`muster why {name}` shows the end of the log of what failed",
            )
        with self._doing(f"read the log of {name}"):
            text = self.cluster.core().read_namespaced_pod_log(
                pods[int(worker)], self.cluster.namespace, container=CONTAINER, _request_timeout=TIMEOUT_SECONDS,
                **({"tail_lines": tail} if tail is not None else {}),
            )  # fmt: skip
        return {
            "attempt": attempt or status["attempt"],
            "attempts": [each["number"] for each in status["attempts"]],
            "worker": int(worker),
            "workers": sorted(pods),
            "text": text or "",
            "offset": 0,
            "nextOffset": len(text or ""),
            "complete": True,
        }

    def _pods(self, item: dict[str, Any], attempt: int) -> dict[int, str]:
        """The names of the attempt's pods, by worker."""
        selector = f"{Label.JOB_UID}={item['metadata']['uid']},{Label.ATTEMPT}={attempt}"
        with self._doing(f"list the pods of {item['metadata']['name']}"):
            found = self.cluster.core().list_namespaced_pod(
                self.cluster.namespace, label_selector=selector, _request_timeout=TIMEOUT_SECONDS
            )
        return {int(pod.metadata.labels[Label.WORKER]): pod.metadata.name for pod in found.items}

    def _follow_logs(self, name: str, params: dict[str, Any]) -> Iterator[StreamEvent]:
        """Attempt after attempt, each from its beginning (or its last lines, for the first that is followed)."""
        attempt, tail, told = params.get("attempt"), params.get("tail"), 0
        while True:
            item = self._object(name)
            status = status_of(item)
            current = attempt or status["attempt"]
            pods = self._pods(item, current) if current > told else {}
            wanted = {
                worker: pod for worker, pod in pods.items() if params.get("worker") in ("all", str(worker), worker)
            }
            if wanted:
                yield StreamEvent("attempt", json.dumps({"attempt": current}))
                for worker, line in self._lines(wanted, tail):
                    yield StreamEvent("log", json.dumps({"attempt": current, "worker": worker, "line": line}))
                told, tail = current, None
            elif status["phase"] in _ENDED or (attempt is not None and told):
                yield StreamEvent("end", json.dumps({"phase": status["phase"]}))
                return
            time.sleep(POLL_SECONDS)

    def _lines(self, pods: dict[int, str], tail: int | None) -> Iterator[tuple[int, str]]:
        """The lines of all these pods as they are written, until the last of them has ended."""
        lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()

        def read(worker: int, pod: str) -> None:
            more = {"tail_lines": tail} if tail is not None else {}
            while True:
                try:
                    reply = self.cluster.core().read_namespaced_pod_log(
                        pod, self.cluster.namespace, container=CONTAINER, follow=True, _preload_content=False, **more
                    )
                    for line in _split(reply.stream(decode_content=True)):
                        lines.put((worker, line))
                    break
                except Exception as error:  # not started yet, or gone: the status of the response says which
                    if getattr(error, "status", 0) != 400:
                        break
                    time.sleep(POLL_SECONDS)
            lines.put((worker, None))

        for worker, pod in pods.items():
            threading.Thread(target=read, args=(worker, pod), daemon=True, name=f"log of {pod}").start()
        reading = len(pods)
        while reading:
            worker, line = lines.get()
            if line is None:
                reading -= 1
            else:
                yield worker, line

    # --- objects ---

    def _object(self, name: str) -> dict[str, Any]:
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
        for item in self._objects(""):
            if name in (id_of(item), item["metadata"]["uid"]):
                self._names[name] = item["metadata"]["name"]
                return item
        raise self._no_job(name)

    def _objects(self, labels: str) -> Iterable[dict[str, Any]]:
        """Every TrainingJob of the namespace, in pages."""
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

    def _doing(self, what: str) -> Any:
        return cluster_errors(self.cluster, what)

    def _no_job(self, name: str) -> CliError:
        where = f"namespace {self.cluster.namespace!r} of context {self.cluster.context!r}"
        next_step = f"`muster --context {self.cluster.context} ls` lists the jobs; --namespace looks elsewhere"
        return CliError(f"there is no job {name!r} in {where}", code="job_not_found", next_step=next_step)

    def _needs_api(self, path: str) -> CliError:
        return usage(
            f"a cluster alone can't answer {path.split('/')[-1].split(':')[-1]!r}: Muster's API does",
            "use --server (docs/install.md says how to reach the API), without --context",
            "needs-api",
        )


def _split(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines of a stream of bytes, the last one too when it has no end."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
