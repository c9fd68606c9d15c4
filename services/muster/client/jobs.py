"""Jobs, whose steps are in `operations`, for programs with threads.

Written from `async_jobs.py` by `tools/generate_client.py`; change that file.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.client import operations
from muster.client.answers import JobView, LogLine, Metrics, Update, UpdateMaker, log_line, parsed
from muster.client.connection import Connection
from muster.client.documents import JobSource, job_document, source_folder
from muster.client.errors import MusterError
from muster.client.following import moments
from muster.client.outgoing import Progress, nobody
from muster.client.transfers import transferred
from muster.plan.estimate import Estimate
from muster.replies.jobs import AttemptList, CheckpointList, Event, JobSummary, Plan, SamplesReply, Why
from muster.words.data_report import DataReport
from muster.words.profiles import ProfileRequest, ProfilesReply


class Job(JobView):
    """One job. What it shows is as of when it was last asked for; every method that asks raises MusterError."""

    def __init__(self, connection: Connection, document: Mapping[str, Any]) -> None:
        super().__init__(document)
        self._connection = connection

    def refresh(self) -> Job:
        """Ask for the job as it is now; returns this very job."""
        self.document = self._connection.run(operations.ask("GET", f"jobs/{self.id}"))
        return self

    # -- until it ends ------------------------------------------------------------------------------------------------

    def wait(self, timeout_seconds: float | None = None, check: bool = True, progress: bool | None = None) -> Job:
        """Wait until the job has ended, at most so many seconds; returns this very job.

        Raises WaitTimeout, and JobFailed where the job does not succeed, unless `check` is False. In a notebook its
        progress is shown meanwhile, unless `progress` is False.
        """
        self._connection.run(operations.wait(self.id, timeout_seconds, check, self._watcher(progress)))
        return self

    def follow(self) -> Iterator[Update]:
        """Yield the job's changes every half second until it has ended; the last update reports its end."""
        updates = UpdateMaker()
        for moment in self._connection.walk(moments(self.id)):
            self.document = moment.job
            yield updates.of(moment)

    def follow_events(self, after: int = 0, types: Sequence[str] = ()) -> Iterator[Event]:
        """Events as they happen, until the job has ended, over broken connections without a loss or a repetition."""
        path = f"jobs/{self.id}/events"
        for message in self._connection.stream(path, str(after), follow=True, type=[*types]):
            if message.event != "end":
                yield parsed(Event, message.json())

    def follow_logs(
        self, attempt: int | None = None, worker: int | None = None, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Lines as the worker writes them, or as all do, attempt after attempt until the job has ended."""
        chosen: dict[str, Any] = {"attempt": attempt, "worker": "all" if worker is None else worker, "tail": tail}
        for message in self._connection.stream(f"jobs/{self.id}/logs", follow=True, **chosen):
            if (line := log_line(message)) is not None:
                yield line

    # -- what is known of it ------------------------------------------------------------------------------------------

    def events(self, after: int = 0, types: Sequence[str] = ()) -> tuple[Event, ...]:
        """Return the events, oldest first, after the one with the id `after`."""
        documents = self._connection.run(operations.events(self.id, after, tuple(types)))
        return tuple(parsed(Event, event) for event in documents)

    def logs(self, attempt: int | None = None, worker: int = 0, tail: int | None = None) -> str:
        """Return the worker's log of an attempt (default: the newest), or its last `tail` lines."""
        return self._connection.run(operations.log(self.id, attempt, worker, tail))

    def metrics(self, points: int = 10_000, after_step: int = 0) -> Metrics:
        """The loss curve and its companions: at most so many points, evenly spaced."""
        return parsed(Metrics, self._get("metrics", points=points, afterStep=after_step))

    def why(self) -> Why:
        """Return the reason for the job's state, and what to do next."""
        return parsed(Why, self._get("why"))

    def attempts(self) -> AttemptList:
        """Return the attempts, each with its cost."""
        return parsed(AttemptList, self._get("attempts"))

    def checkpoints(self) -> CheckpointList:
        """The commits that are in the job's folder now."""
        return parsed(CheckpointList, self._get("checkpoints"))

    def samples(self, limit: int = 10) -> SamplesReply:
        """Return the model's samples from its newest evaluations."""
        return parsed(SamplesReply, self._get("samples", limit=limit))

    def profiles(self) -> ProfilesReply:
        """The traces that were taken of the job's steps, and the last that was asked for."""
        return parsed(ProfilesReply, self._get("profiles"))

    def export(
        self,
        to: str | Path,
        step: int | str = "best",
        *,
        format: str = "transformers",
        dtype: str = "keep",
        ema: bool = False,
        progress: Progress = nobody,
    ) -> Path:
        """Fetch the model of a commit (`best`, `last` or a step), as the server makes it, into the folder `to`.

        `format` is transformers, with an adapter merged into its model, or peft, the adapter alone; `dtype` is keep or
        bf16; `ema` takes the average of the weights. What an earlier try has left is gone on with.
        """
        form = {"format": format, "dtype": dtype, "ema": ema}
        transferred(
            self._connection,
            lambda transfers, report: transfers.export(self.id, step, Path(to), report, **form),
            progress,
        )
        return Path(to)

    # -- what can be done with it -------------------------------------------------------------------------------------

    def cancel(self) -> Job:
        """Stop the job for good. Returns this very job, which ends a little later: wait(check=False)."""
        return self._act("cancel")

    def suspend(self) -> Job:
        """Stop the job after a commit; `resume` lets it go on from there."""
        return self._act("suspend")

    def resume(self) -> Job:
        """Resume the suspended job from its last checkpoint."""
        return self._act("resume")

    def clone(self, name: str | None = None, spec: Mapping[str, Any] | None = None, key: str | None = None) -> Job:
        """Submit a copy, changed by `spec` as a JSON merge patch (RFC 7396). `key`: as of `Jobs.submit`."""
        changes = dict(spec) if spec is not None else None
        steps = operations.clone(self.id, name, changes, key or str(uuid.uuid4()))
        return Job(self._connection, self._connection.run(steps))

    def annotate(
        self, *, add_tags: Sequence[str] = (), remove_tags: Sequence[str] = (), note: str | None = None
    ) -> Job:
        """Add and remove tags, and write the job's note, or remove it by an empty one; returns this very job. Nothing
        of how it runs changes."""
        steps = operations.annotate(self.id, add_tags, remove_tags, note)
        self.document = self._connection.run(steps)
        return self

    def profile(self, steps: int = 5, ranks: Sequence[int] = (0,)) -> ProfileRequest:
        """Ask for a trace of the running job's next steps; `profiles` shows by the request's id what came of it."""
        return parsed(ProfileRequest, self._connection.run(operations.profile(self.id, steps, tuple(ranks))))

    def delete(self, checkpoints: bool = False) -> None:
        """Delete the ended job's records and logs, and with `checkpoints` what it committed."""
        self._connection.run(operations.ask("DELETE", f"jobs/{self.id}", checkpoints=checkpoints or None))

    def _get(self, question: str, **params: Any) -> Any:
        return self._connection.run(operations.ask("GET", f"jobs/{self.id}/{question}", **params))

    def _act(self, verb: str) -> Job:
        self.document = self._connection.run(operations.ask("POST", f"jobs/{self.id}:{verb}"))
        return self


class Jobs:
    """The jobs of one server. Every method raises MusterError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def submit(
        self, job: JobSource, *, name: str | None = None, project: str | None = None, key: str | None = None
    ) -> Job:
        """Submit a job: a mapping, YAML text, the path of a file or a model of the contract. A program's source folder
        is uploaded, unless the project has the same content.

        It is sent again after a lost answer, under one idempotency key, so that one call makes one job. With a `key` of
        your own that holds over calls: the same key and document give the same job, also after a crash in between.
        """
        sent = job_document(job, name, project, self._connection.server.local)
        if source_folder(sent.data) is not None:
            transferred(self._connection, lambda sender, progress: sender.send_source_of(sent.data, progress), nobody)
        try:
            document = self._connection.run(operations.submit(sent.data, key or str(uuid.uuid4())))
        except MusterError as error:
            raise sent.located(error) from None
        return Job(self._connection, document)

    def plan(self, job: JobSource, *, name: str | None = None, project: str | None = None) -> Plan:
        """Return the plan of a submission, or its refusals: what it would do, need and cost, and the faults that would
        end it at its start. Nothing is stored, and a source folder is not uploaded."""
        sent = job_document(job, name, project, self._connection.server.local)
        if (source := source_folder(sent.data)) is not None:
            del source.holder[source.key]
        try:
            return parsed(Plan, self._connection.run(operations.plan(sent.data)))
        except MusterError as error:
            raise sent.located(error) from None

    def estimate(self, job: JobSource) -> Estimate:
        """Estimate a job's memory, time and cost from what the server knows of similar jobs."""
        sent = job_document(job, local=self._connection.server.local)
        try:
            return parsed(Estimate, self._connection.run(operations.ask("POST", "jobs:estimate", sent.data)))
        except MusterError as error:
            raise sent.located(error) from None

    def inspect(self, job: JobSource) -> DataReport:
        """Show a job's data as the model would see it, uploaded or below the project's `dataPrefixes`: counts, lengths,
        what is left out and why, the first samples. Nothing is stored."""
        sent = job_document(job, local=self._connection.server.local)
        try:
            return parsed(DataReport, self._connection.run(operations.inspect(sent.data)))
        except MusterError as error:
            raise sent.located(error) from None

    def get(self, name: str) -> Job:
        """The newest job of that name, or the one of that id. Raises NotFound."""
        return Job(self._connection, self._connection.run(operations.get(name)))

    def list(
        self,
        *,
        limit: int | None = None,
        phase: Sequence[str] = (),
        label: Sequence[str] = (),
        name: str | None = None,
        project: str | None = None,
        owner: str | None = None,
        live: bool | None = None,
        tag: str | None = None,
    ) -> Iterator[JobSummary]:
        """The newest jobs, all or so many, newest first. Filters combine; a `label` is `key=value`."""
        filters = {
            "phase": [*phase],
            "label": [*label],
            "name": name,
            "project": project,
            "owner": owner,
            "live": live,
            "tag": tag,
        }
        for page in self._connection.walk(operations.pages(limit, filters)):
            for line in page:
                yield parsed(JobSummary, line)
