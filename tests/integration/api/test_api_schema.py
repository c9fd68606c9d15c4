"""The API against its own OpenAPI document: no 5xx, no reply that the document does not promise (schemathesis)."""

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
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import CoverageScenario
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
from tests.integration.api.postgres import PostgresServer

from muster.api.app import create_app
from muster.api.jobs import removal
from muster.api.settings import Settings
from muster.contract.status import Phase

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
EXAMPLES, EXAMPLES_LONG = 5, 10

schemathesis.serializer.alias("application/offset+octet-stream", "application/octet-stream")  # of tus
schema = schemathesis.openapi.from_dict(create_app(Settings(state=Path("unused"), auth=True)).openapi())
# A text that is too long for its field may be too long for the whole body.
schema.config.checks.negative_data_rejection.expected_statuses.append("413")
# Thousands of systematically wrong bodies take minutes, and never get as far as the database: once for them is enough.
random_only = schemathesis.openapi.from_dict(schema.raw_schema)
random_only.config.phases.coverage.enabled = False


@dataclass
class Server:
    url: str
    jobs: list[str]
    fine_tune: str


@contextmanager
def in_thread(state: Path, **options: Any) -> Iterator[Server]:
    """A served API in a loop of its own, with jobs in several phases: schemathesis itself is synchronous."""
    started, stop = threading.Event(), threading.Event()
    found: list[Server] = []
    errors: list[BaseException] = []

    async def run() -> None:
        short = {"stream_seconds_max": 0.1, "stream_ping_seconds": 0.05}
        # No operator removes what is deleted here, so nothing is gained by waiting for one.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(removal, "GONE_SECONDS", 0.05)
            patch.setattr("muster.api.exports.routes.available", lambda: False)  # a model takes seconds to make
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
            found.append(Server(str(here.client.base_url), jobs, fine_tune))
            started.set()
            await asyncio.to_thread(stop.wait)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            errors.append(error)
            started.set()

    thread = threading.Thread(target=main)
    thread.start()
    started.wait(60)
    try:
        if errors:
            raise errors[0]
        yield found[0]
    finally:
        stop.set()
        thread.join(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with in_thread(tmp_path_factory.mktemp("schema")) as running:
        yield running


@pytest.fixture(scope="module")
def on_postgresql(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    url = postgres.url(postgres.new_database())
    with in_thread(tmp_path_factory.mktemp("schema"), database_url=url) as running:
        yield running


some = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(some, max_examples=EXAMPLES_LONG)


@random_only.parametrize()
@some
def test_the_api_keeps_its_promises(case: Any, server: Server) -> None:
    keeps_its_promises(case, server)


# What holds a job's spec is tried where a job is submitted: every field of it takes a minute.
@pytest.mark.long
@schema.exclude(path=["/api/v1/sweeps", "/api/v1/jobs:estimate", "/api/v1/jobs:inspect"], method="POST").parametrize()
@many
def test_the_api_keeps_its_promises_for_every_kind_of_wrong_body(case: Any, server: Server) -> None:
    keeps_its_promises(case, server)


@pytest.mark.long
@pytest.mark.postgres
@random_only.parametrize()
@many
def test_the_api_keeps_its_promises_on_postgresql(case: Any, on_postgresql: Server) -> None:
    keeps_its_promises(case, on_postgresql)


def keeps_its_promises(case: Any, server: Server) -> None:
    parameters = case.path_parameters or {}
    if len(parameters.get("job_id", "x")) % 2 == 0:  # half of them about jobs that exist
        parameters["job_id"] = server.jobs[len(parameters["job_id"]) // 2 % len(server.jobs)]
    if len(parameters.get("fine_tuning_job_id", "x")) % 2 == 0:
        parameters["fine_tuning_job_id"] = server.fine_tune
    reply = case.call_and_validate(base_url=server.url, headers=HEADERS, checks=CHECKS)
    if case.path == "/api/v1/sweeps" and reply.status_code == 201:  # hundreds that live would keep the server busy
        httpx2.post(f"{server.url}/api/v1/sweeps/{reply.json()['id']}:cancel", headers=HEADERS).raise_for_status()


def test_every_operation_is_described_and_has_an_example() -> None:
    document = schema.raw_schema
    missing: list[str] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method.upper()} {path}"
            if not operation.get("summary") or not operation.get("description"):
                missing.append(f"{where}: summary or description")
            good = [
                reply for status, reply in operation["responses"].items() if status.startswith("2") and status != "204"
            ]
            shown = [content for reply in good for kind, content in reply.get("content", {}).items() if "json" in kind]
            if any("example" not in content for content in shown):
                missing.append(f"{where}: an example of its reply")
            body = operation.get("requestBody", {}).get("content", {})
            if any("example" not in content for content in body.values()):
                missing.append(f"{where}: an example of its body")
            missing += [
                f"{where}: a problem for {s}"
                for s, r in operation["responses"].items()
                if s >= "400" and not r["content"]
            ]
    assert missing == []


def test_the_example_job_is_accepted(server: Server) -> None:
    body = schema.raw_schema["paths"]["/api/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    reply = httpx2.post(f"{server.url}/api/v1/jobs?dryRun=true", json=body["example"], headers=HEADERS)
    refusals = [refusal["code"] for refusal in reply.json()["refusals"]]
    assert (reply.status_code, [code for code in refusals if code != "name_taken"]) == (200, [])
