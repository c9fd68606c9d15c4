"""The questions that the API answers, answered by a cluster without one (`muster --context NAME`).

TrainingJobs, their Kubernetes events and their pods' logs are read and written as the person of the kubeconfig. What
only the API keeps (metrics, the history of jobs that are gone, checkpoints' lists) is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from muster.cli.cluster_connection import NamedCluster
from muster.cli.cluster_objects import PAGE_JOBS, ClusterObjects
from muster.cli.cluster_streams import ENDED, StreamEvent, events_after, follow_events, follow_logs
from muster.cli.cluster_views import id_of, job_view, status_of, summary_of, why_view
from muster.cli.errors import CliError, DocumentFault, ExitStatus, usage
from muster.recipe.document import Submission, parse_job
from muster.recipe.job_inputs import with_input_folder
from muster.replies.views import plan_view, status_view
from muster.words.base import DocumentProblem, InvalidDocument
from muster.words.names import Label, Phase
from muster.words.text import nearest

# The queue is the operator's, which answers the API alone: whoever has a kubeconfig may see less of others' jobs.
_UNFORESEEN = {
    "verdict": "unknown",
    "code": "",
    "because": "only Muster's API can ask the operator what the queue would do: use --server, without --context",
    "nodes": 0,
    "allowedBy": None,
    "evictions": [],
}
_UNCHECKED: dict[str, Any] = {
    "refusals": [],
    "faults": [],
    "warnings": [],
    "estimate": None,
    "notEstimated": "Muster's API reads models and data; `muster estimate FILE --here` does so on this machine",
}


@dataclass(frozen=True)
class ClusterPlace:
    """Stand-in for the server's address. It is not `local`: no path of this machine means anything there."""

    url: str
    local: bool = False


class ClusterClient:
    """One namespace of one cluster. Use as a context manager, or close it."""

    def __init__(self, cluster: NamedCluster) -> None:
        self.cluster = cluster
        self.server = ClusterPlace(f"context {cluster.context}")
        self._objects = ClusterObjects(cluster)

    def __enter__(self) -> ClusterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.cluster.close()

    # --- the questions of the API ---

    def get(self, path: str, **params: Any) -> Any:
        """Answer `jobs/NAME` or `jobs/NAME/QUESTION`."""
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
        return answers[question](self._objects.job(name), **params)

    def post(self, path: str, body: Any = None, key: str | None = None, repeat: bool = True, **params: Any) -> Any:
        name, _, verb = path.removeprefix("jobs/").partition(":")
        changes = {"cancel": {"cancel": True}, "suspend": {"suspend": True}, "resume": {"suspend": False}}
        if verb not in changes:
            raise self._needs_api(path)
        item = self._objects.job(name)
        status = status_of(item)
        if status["phase"] in ENDED and not (verb == "cancel" and status["phase"] == Phase.CANCELLED):
            raise CliError(
                f"{item['metadata']['name']} has ended ({status['phase']}), so it can't {verb}", code="job_finished"
            )
        if verb == "resume" and item["spec"].get("cancel"):
            raise CliError(f"{item['metadata']['name']} is being cancelled, so it can't resume", code="job_cancelling")
        return job_view(self._objects.change(item, changes[verb], verb))

    def put(self, path: str, body: Any) -> Any:
        raise self._needs_api(path)

    def patch(self, path: str, body: Any) -> Any:
        raise self._needs_api(path)

    def delete(self, path: str, **params: Any) -> None:
        raise self._needs_api(path)

    def job_id(self, name: str) -> str:
        """The id of the job of that name or id. Raises CliError for none."""
        return id_of(self._objects.job(name))

    def job_pages(self, limit: int, **filters: Any) -> Iterator[list[dict[str, Any]]]:
        """The newest `limit` jobs, newest first: a cluster lists by name, so all are read before the first is given."""
        if filters.get("tag"):
            raise self._needs_api("tags")
        phases = filters.get("phase") or []
        for word in phases:
            if word not in {str(phase) for phase in Phase}:
                problem = DocumentProblem("--phase", f"{word!r} is not one of {', '.join(Phase)}", nearest(word, Phase))
                raise CliError(str(problem), ExitStatus.USAGE, "invalid_parameter", faults=(DocumentFault(problem),))
        owned = {Label.PROJECT: filters.get("project"), Label.OWNER: filters.get("owner")}
        labels = [*(filters.get("label") or []), *(f"{key}={value}" for key, value in owned.items() if value)]
        summaries = [
            summary
            for item in self._objects.jobs(",".join(labels))
            if (summary := summary_of(item))
            and (not phases or summary["phase"] in phases)
            and (not filters.get("live") or summary["phase"] not in ENDED)
            and filters.get("name") in (None, summary["name"])
        ]
        summaries.sort(key=lambda summary: summary["createdAt"], reverse=True)
        for start in range(0, min(limit, len(summaries)), PAGE_JOBS):
            yield summaries[start : min(start + PAGE_JOBS, limit)]

    def plan(self, document: Any) -> dict[str, Any]:
        """The cluster's own dry run: its schema, its policies and its quotas are asked, and nothing is stored."""
        submission = self._parsed(document)
        self._objects.create(submission, dry_run=True)
        plan = plan_view(submission.name, self.cluster.namespace, submission.labels, submission.spec)
        return {"accepted": True, **plan, "admission": _UNFORESEEN, **_UNCHECKED}

    def submit(self, document: Any) -> dict[str, Any]:
        return job_view(self._objects.create(self._parsed(document), dry_run=False))

    def stream(self, path: str, last_id: str = "", **params: Any) -> Iterator[StreamEvent]:
        """Yield events or log lines until the job ends."""
        name, _, question = path.removeprefix("jobs/").partition("/")
        if question == "events":
            return follow_events(self._objects, name, int(last_id or 0), params.get("type") or [])
        return follow_logs(self._objects, name, params)

    # --- submission ---

    def _parsed(self, document: Any) -> Submission:
        try:
            submission = parse_job(document)
        except InvalidDocument as invalid:
            faults = tuple(DocumentFault(problem) for problem in invalid.problems)
            what = f"the job is not valid: {invalid.count} problem{'' if invalid.count == 1 else 's'}"
            raise CliError(what, ExitStatus.USAGE, "invalid_job", faults=faults) from None
        if submission.namespace not in (None, self.cluster.namespace):
            raise usage(
                f"the file names namespace {submission.namespace!r}, and the context's is {self.cluster.namespace!r}",
                f"muster --context {self.cluster.context} --namespace {submission.namespace} submit …",
                "other-namespace",
            )
        return self._with_folder(submission)

    def _with_folder(self, submission: Submission) -> Submission:
        """Replace `{job: NAME}` by the folder of that job's commits, and `last` and `best` by their steps where its
        status names them, as the API does. Retention is not held off: only the API pins what jobs will read."""
        spec = submission.spec
        for path, source in spec.input_commits().items():
            if source.job is None or source.uri is not None:
                continue
            checkpoint = status_of(self._objects.job(source.job)).get("checkpoint")
            if not checkpoint:
                problem = DocumentProblem(f"spec.{path}.job", f"job {source.job!r} has no checkpoint yet")
                raise CliError(str(problem), ExitStatus.USAGE, "invalid_job", faults=(DocumentFault(problem),))
            named = {"last": checkpoint["step"], "best": checkpoint.get("bestStep")}
            spec = with_input_folder(spec, path, checkpoint["uri"], named.get(str(source.step)))
        return submission.model_copy(update={"spec": spec})

    # --- events and logs ---

    def _events(self, item: dict[str, Any], after: int = 0, limit: int = 500, **filters: Any) -> dict[str, Any]:
        chosen = events_after(self._objects, item, after, limit, filters.get("type") or [])
        return {"items": chosen, "lastId": chosen[-1]["id"] if chosen else after}

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
        pods = self._objects.pods(item, attempt or status["attempt"])
        if int(worker) not in pods:
            raise CliError(
                f"{name} has no pod of worker {worker} in attempt {attempt or status['attempt']}: a cluster has "
                "the logs of pods that are there, and Muster's API keeps the others",
                code="log_not_found",
                next_step=f"`muster why {name}` shows the end of the log of what failed",
            )
        text = self._objects.log(name, pods[int(worker)], tail)
        return {
            "attempt": attempt or status["attempt"],
            "attempts": [each["number"] for each in status["attempts"]],
            "worker": int(worker),
            "workers": sorted(pods),
            "text": text,
            "offset": 0,
            "nextOffset": len(text),
            "complete": True,
        }

    def _needs_api(self, path: str) -> CliError:
        return usage(
            f"a cluster alone can't answer {path.split('/')[-1].split(':')[-1]!r}: Muster's API does",
            "use --server (docs/install.md says how to reach the API), without --context",
            "needs-api",
        )
