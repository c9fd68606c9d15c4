"""The API against its own OpenAPI document: no 5xx, no reply that the document does not promise (schemathesis)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from schemathesis.schemas import BaseSchema
from tests.integration.api.postgres import PostgresServer
from tests.integration.api.schema_house import HEADERS, Server, in_thread, must_keep_its_promises, same, schema_of

# A job's specification is tried where a job is submitted: each of its fields again at these takes a minute.
HOLD_A_SPECIFICATION = ["/api/v1/sweeps", "/api/v1/jobs:estimate", "/api/v1/jobs:inspect"]


@pytest.fixture(scope="module")
def server(postgres: PostgresServer, migrated: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    url = postgres.url(postgres.new_database(migrated))
    with in_thread(tmp_path_factory.mktemp("schema"), database_url=url) as running:
        yield running


# Made when a test asks for it, not at import: every process of every test run imports this file.
@pytest.fixture(scope="module")
def every_kind_of_wrong_body(server: Server) -> BaseSchema:
    return schema_of(server)


@pytest.fixture(scope="module")
def random_only(server: Server) -> BaseSchema:
    schema = schema_of(server)
    schema.config.phases.coverage.enabled = False
    return schema


@pytest.mark.long
@pytest.mark.timeout(900)
@(
    schemathesis.pytest.from_fixture("every_kind_of_wrong_body")
    .include(path_regex="^/api/v1/")
    .exclude(path=HOLD_A_SPECIFICATION, method="POST")
    .parametrize()
)
@same
def test_the_api_keeps_its_promises(case: Any, server: Server) -> None:
    must_keep_its_promises(case, server)


@pytest.mark.long
@schemathesis.pytest.from_fixture("random_only").include(path=HOLD_A_SPECIFICATION, method="POST").parametrize()
@same
def test_the_api_keeps_its_promises_where_it_reads_a_specification(case: Any, server: Server) -> None:
    must_keep_its_promises(case, server)


def test_every_operation_is_described_and_has_an_example(server: Server) -> None:
    document = server.description
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


def test_two_models_that_share_a_word_are_described_apart(server: Server) -> None:
    schemas = server.description["components"]["schemas"]
    assert {"beta", "loss"} <= schemas["Dpo"]["properties"].keys()  # of a job; and of OpenAI's API:
    assert schemas["DpoMethod"]["properties"].keys() == {"hyperparameters"}


def test_the_example_job_is_accepted(server: Server) -> None:
    body = server.description["paths"]["/api/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    reply = httpx2.post(f"{server.url}/api/v1/jobs?dryRun=true", json=body["example"], headers=HEADERS)
    refusals = [refusal["code"] for refusal in reply.json()["refusals"]]
    assert (reply.status_code, [code for code in refusals if code != "name_taken"]) == (200, [])
