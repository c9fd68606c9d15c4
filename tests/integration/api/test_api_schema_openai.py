"""As test_api_schema.py, for what OpenAI's clients speak and for health: apart, so that another process may run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from schemathesis.schemas import BaseSchema
from tests.integration.api.postgres import PostgresServer
from tests.integration.api.schema_house import Server, in_thread, must_keep_its_promises, same, schema_of


@pytest.fixture(scope="module")
def server(postgres: PostgresServer, migrated: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    url = postgres.url(postgres.new_database(migrated))
    with in_thread(tmp_path_factory.mktemp("schema"), database_url=url) as running:
        yield running


# Made when a test asks for it, not at import: every process of every test run imports this file.
@pytest.fixture(scope="module")
def every_kind_of_wrong_body(server: Server) -> BaseSchema:
    return schema_of(server)


@pytest.mark.long
@pytest.mark.timeout(900)
@schemathesis.pytest.from_fixture("every_kind_of_wrong_body").exclude(path_regex="^/api/v1/").parametrize()
@same
def test_the_api_keeps_its_promises_to_openais_clients(case: Any, server: Server) -> None:
    must_keep_its_promises(case, server)
