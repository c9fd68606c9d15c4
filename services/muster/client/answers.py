"""Replies of Muster as Python objects: the contract's models, and views made of them."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from muster.client import notebook
from muster.client.errors import InvalidRequest, MusterError
from muster.client.exchange import StreamEvent
from muster.client.following import JobMoment
from muster.recipe.document import JobSpec
from muster.replies.jobs import Event, History, JobMetadata, Point, Reply
from muster.words.base import known_part
from muster.words.status import JobStatus, Phase, Progress

M = TypeVar("M", bound=BaseModel)


def parsed(model: type[M], document: Any) -> M:
    """The answer as that model. Raises MusterError for one that this release can't read."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MusterError(
            f"the server's answer is none that this release can read: {model.__name__} {where}: {first['msg']}",
            "unknown-answer",
            next_step="install the release of muster-train that the server runs",
        ) from None


class Metrics(History):
    """A job's loss curve and its companions over all attempts; a step that was trained again appears once."""

    def to_pandas(self, evaluations: bool = False) -> Any:
        """A pandas.DataFrame: a row for each step, or for each evaluation, indexed by `step`; `at` is in UTC.

        What the objective reports by name (`rewards/margins`) has columns of these names, evaluations' after
        `evaluation/`. Raises InvalidRequest where pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")  # an optional one: for those who want tables
        except ImportError:
            raise InvalidRequest("to_pandas() needs pandas", "no-pandas", next_step="pip install pandas") from None
        rows = [_row(each) for each in (self.evaluations if evaluations else self.points)]
        index = pandas.Index([row.pop("step") for row in rows], name="step", dtype="int64")
        columns = None if rows else list(_row(_NO_POINT))[1:]
        return pandas.DataFrame(rows, index=index, columns=columns)

    def _repr_html_(self) -> str:
        return notebook.curve_html([(point.step, point.loss) for point in self.points if point.loss is not None])


_NO_POINT = Point(attempt=0, step=0)


def _row(point: BaseModel) -> dict[str, Any]:
    """One number or time per column, `step` first."""
    row = dict(point)
    values, evaluation_values = row.pop("values", {}), row.pop("evaluation_values", {})
    at = row.pop("at", None)
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC) if at is not None else None
    named = {f"evaluation/{name}": value for name, value in evaluation_values.items()}
    return {"step": row.pop("step"), **row, "at": moment, **values, **named}


class LogLine(Reply):
    """A line that a worker wrote."""

    attempt: int
    worker: int
    line: str


@dataclass(frozen=True)
class Update:
    """Changes of a job since the previous update. `steps` are those of the running attempt."""

    status: JobStatus
    progress: Progress
    events: tuple[Event, ...]
    steps: tuple[Point, ...]

    @property
    def phase(self) -> Phase:
        return self.status.phase

    @property
    def ended(self) -> bool:
        return self.phase.terminal


class UpdateMaker:
    """Makes updates of moments: a moment without new steps repeats those of the one before, an update does not."""

    def __init__(self) -> None:
        self._newest = (0, -1)  # attempt and step

    def of(self, moment: JobMoment) -> Update:
        new = [step for step in moment.steps if (step["attempt"], step["step"]) > self._newest]
        if new:
            self._newest = (new[-1]["attempt"], new[-1]["step"])
        return Update(
            parsed(JobStatus, moment.status),
            parsed(Progress, moment.progress),
            tuple(parsed(Event, event) for event in moment.events),
            tuple(parsed(Point, step) for step in new),
        )


class JobView:
    """A job as it was when it was last asked for; `refresh()` asks anew. `document` is the API's own JSON."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = dict(document)

    @property
    def id(self) -> str:
        return str(self.document["id"])

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def metadata(self) -> JobMetadata:
        return parsed(JobMetadata, self.document["metadata"])

    @property
    def spec(self) -> JobSpec:
        """Return the spec with all defaults. Values of secret-looking variables are ***, and fields of a newer release
        are left out."""
        return parsed(JobSpec, known_part(JobSpec, self.document["spec"]))

    @property
    def status(self) -> JobStatus:
        return parsed(JobStatus, self.document["status"])

    @property
    def phase(self) -> str:
        """A word of `Phase`, or of a newer server."""
        return str(self.document["status"]["phase"])

    @property
    def because(self) -> str:
        return str(self.document["status"]["because"])

    @property
    def ended(self) -> bool:
        return self.phase in {phase.value for phase in Phase if phase.terminal}

    def _watcher(self, progress: bool | None) -> Callable[[dict[str, Any]], None]:
        """Takes over what is seen of the job, and shows it where that is wanted; None: in a notebook."""
        view = notebook.LiveView() if progress or (progress is None and notebook.in_notebook()) else None

        def seen(document: dict[str, Any]) -> None:
            self.document = document
            if view is not None:
                view.show(document)

        return seen

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.id}): {self.phase}, {self.because}>"

    def _repr_html_(self) -> str:
        return notebook.job_html(self.document)


def log_line(event: StreamEvent) -> LogLine | None:
    """The line of a log stream's event; None for the events about attempts and the end."""
    return parsed(LogLine, event.json()) if event.event == "log" else None
