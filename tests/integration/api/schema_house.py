"""The API that schemathesis asks in the test_api_schema files, and what it may not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
import structlog
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import CoverageScenario
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from tests.integration.api.openai_house import chat_file, models_file
from tests.integration.api.platform import served
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.jobs import removal
from muster.words.status import Phase

TOKEN = "muster_" + "5c" * 20


def wrong_data_is_refused(ctx: Any, response: Any, case: Any) -> bool | None:
    """schemathesis' own check, but for headers that nobody described: HTTP lets everybody send them."""
    data = case.meta.phase.data if case.meta is not None else None
    unknown = getattr(data, "scenario", None) is CoverageScenario.OBJECT_UNEXPECTED_PROPERTIES
    if unknown and data.parameter_location is ParameterLocation.HEADER:
        return None
    return negative_data_rejection(ctx, response, case)


HEADERS = {"authorization": f"Bearer {TOKEN}"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    wrong_data_is_refused,
    unsupported_method,
]
EXAMPLES = 10
schemathesis.serializer.alias("application/offset+octet-stream", "application/octet-stream")  # of tus


@dataclass
class Server:
    url: str
    jobs: list[str]
    fine_tune: str
    description: dict[str, Any]


@contextmanager
def in_thread(state: Path, **options: Any) -> Iterator[Server]:
    """A served API in a loop of its own, with jobs in several phases: schemathesis itself is synchronous."""
    started, stop = threading.Event(), threading.Event()
    found: list[Server] = []
    errors: list[BaseException] = []

    async def run() -> None:
        short = {"stream_seconds_max": 0.1, "stream_ping_seconds": 0.05}
        # Not to sys.stdout: pytest closes and replaces it for each subtest while this thread writes.
        log = (state.parent / f"{state.name}.log").open("w")
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(log))
        # No operator removes what is deleted here, so nothing is gained by waiting for one.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(removal, "GONE_SECONDS", 0.05)
            patch.setattr("muster.api.data.exports.routes.available", lambda: False)  # a model takes seconds to make
            await serve(short)

    async def serve(short: dict[str, float]) -> None:
        state.mkdir(parents=True, exist_ok=True)
        facade = {"base_models_file": models_file(state), "chat_workers": 0}
        async with served(state / "state", auth=True, bootstrap_token=TOKEN, **short, **facade, **options) as (here, _):
            here.client.headers.update(HEADERS)
            asked = {"model": "tiny", "training_file": chat_file(state)}
            fine_tune = (await here.client.post("/v1/fine_tuning/jobs", json=asked)).json()["id"]
            jobs = [(await here.submit(name))["id"] for name in ("waiting", "running", "done")]
            for uid in jobs:
                await here.handed_over(uid)
            here.operate(jobs[1], phase=Phase.RUNNING, code="Training", because="trains", attempt=1)
            await here.finish(jobs[2])
            here.commit(jobs[2], 20)
            folder = here.state.worker(jobs[1], 1, 0)
            folder.mkdir(parents=True)
            (folder / "log").write_text("a line\n")
            found.append(Server(str(here.client.base_url), jobs, fine_tune, here.app.openapi()))
            started.set()
            await asyncio.to_thread(stop.wait)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            errors.append(error)
            started.set()

    logs = structlog.get_config()["logger_factory"]
    thread = threading.Thread(target=main)
    thread.start()
    started.wait(WAIT_SECONDS_MAX)
    try:
        if errors:
            raise errors[0]
        yield found[0]
    finally:
        stop.set()
        thread.join(30)
        structlog.configure(logger_factory=logs)


def schema_of(server: Server) -> BaseSchema:
    schema = schemathesis.openapi.from_dict(server.description)
    schema.config.request_timeout = WAIT_SECONDS_MAX
    # A text that is too long for its field may be too long for the whole body.
    schema.config.checks.negative_data_rejection.expected_statuses.append("413")
    return schema


# The same examples in each run: a request that no change has touched does not fail somebody else's build.
same = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


def must_keep_its_promises(case: Any, server: Server) -> None:
    parameters = case.path_parameters or {}
    if len(parameters.get("job_id", "x")) % 2 == 0:  # half of them about jobs that exist
        parameters["job_id"] = server.jobs[len(parameters["job_id"]) // 2 % len(server.jobs)]
    if len(parameters.get("fine_tuning_job_id", "x")) % 2 == 0:
        parameters["fine_tuning_job_id"] = server.fine_tune
    reply = case.call_and_validate(base_url=server.url, headers=HEADERS, checks=CHECKS)
    if case.path == "/api/v1/sweeps" and reply.status_code == 201:  # hundreds that live would keep the server busy
        httpx2.post(f"{server.url}/api/v1/sweeps/{reply.json()['id']}:cancel", headers=HEADERS).raise_for_status()
