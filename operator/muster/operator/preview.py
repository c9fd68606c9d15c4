"""Previews of admission for jobs that are not submitted, served by the operator's own server.

The API has rows and the operator has the fleet; so a dry run is a question. It is answered by the pass that admission
makes, from what this operator sees, and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from pydantic import ValidationError

from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import NodeReservation
from muster.operator.core.preview import preview
from muster.operator.server import HttpReply, HttpRequest, refusal, words
from muster.operator.world import World
from muster.words.base import dump_json
from muster.words.job import JobSpec
from muster.words.preview import PreviewQuestion
from muster.words.status import JobStatus

BODY_BYTES_MAX = 4_000_000  # a job is smaller: the API takes no larger document
# A pass over a large fleet takes a second; longer than this the API does not wait either.
SECONDS_MAX = 5.0


class PreviewHandler:
    """Answers the API's questions, one after the other: each takes the processor from the passes over the jobs.

    While another operator leads, or before the world is open, it refuses with 503. `token` is called for each request.
    The spec that is asked about is read as `spec_type`, and `complete` adds to it what the installation gives to jobs
    that name nothing.
    """

    def __init__(
        self,
        token: Callable[[], str | None],
        spec_type: type[JobSpec],
        complete: Callable[[JobSpec], JobSpec] = lambda spec: spec,
    ) -> None:
        self._token, self._spec_type, self._complete = token, spec_type, complete
        self._world: tuple[World, asyncio.AbstractEventLoop] | None = None
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def opened(self, world: World) -> Iterator[None]:
        """Within the event loop in which the world may be asked."""
        self._world = world, asyncio.get_running_loop()
        try:
            yield
        finally:
            self._world = None

    def __call__(self, request: HttpRequest) -> HttpReply:
        if (refused := refusal(request, self._token(), BODY_BYTES_MAX)) is not None:
            return refused
        if self._world is None:
            return HttpReply(503, words("this operator does not lead; try again"))
        try:
            asked = PreviewQuestion.model_validate_json(request.body())
            spec = self._spec_type.model_validate(asked.spec)
        except ValidationError as error:
            return HttpReply(
                400, words(f"this is no question that this version understands: {error.error_count()} faults")
            )
        if not self._turn.acquire(timeout=SECONDS_MAX):
            return HttpReply(503, words("this operator answers others; try again"))
        try:
            fleet, reservations = self._seen(*self._world)
            return HttpReply(
                200, dump_json(preview(fleet, reservations, _summary(asked, self._complete(spec)))).encode()
            )
        except (TimeoutError, asyncio.CancelledError, RuntimeError) as error:  # the loop is busy, or ends
            return HttpReply(503, words(f"this operator can't say now: {type(error).__name__}"))
        finally:
            self._turn.release()

    def _seen(self, world: World, loop: asyncio.AbstractEventLoop) -> tuple[Fleet, tuple[NodeReservation, ...]]:
        async def look() -> tuple[Fleet, tuple[NodeReservation, ...]]:
            reservations = await world.reservations()
            return await world.fleet(), reservations.entries

        return asyncio.run_coroutine_threadsafe(look(), loop).result(SECONDS_MAX)


def _summary(asked: PreviewQuestion, spec: JobSpec) -> JobSummary:
    now = time.time()
    return JobSummary(
        uid=str(uuid.uuid4()),
        namespace=asked.namespace,
        name=asked.name,
        created_at=now,
        deleting=False,
        spec=spec,
        status=JobStatus(queued_at=now, since=now),
        project=asked.project,
        owner=asked.owner,
    )
