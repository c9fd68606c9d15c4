"""`/` and `/docs` come from the API itself: no scripts, nothing fetched from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, platform
from tests.tidy.repository import ROOT


@pytest.fixture
async def local(tmp_path: Path) -> Any:
    async with platform(tmp_path / "state") as here:
        yield here


async def test_the_root_says_what_this_is_and_where(local: Platform) -> None:
    places = (await local.client.get("/")).json()
    assert places["name"] == "Muster"
    for key in ("docs", "openapi", "health", "metrics"):
        assert (await local.client.get(places[key])).status_code == 200, key
    assert places["ready"] == "/readyz"
    await local.ready()  # not at once: the mirror may still read the cluster
    page = await local.client.get("/", headers={"accept": "text/html,*/*"})
    assert '<a href="/docs">' in page.text


async def test_the_docs_name_every_operation_and_fetch_nothing(local: Platform) -> None:
    page = await local.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    described = (await local.client.get("/api/v1/openapi.json")).json()
    for methods in described["paths"].values():
        for operation in methods.values():
            assert f'id="{operation["operationId"]}"' in page.text
    assert not re.search(r"<script|<link|<iframe|<img|src=|@import|url\(", page.text)
    before = await local.client.get("/api/v1/docs")
    assert (before.status_code, before.headers["location"]) == (308, "/docs")


async def test_every_address_in_the_documents_is_served(local: Platform) -> None:
    """The page about clients named one that was a 404. A base of addresses, as OpenAI's clients have it, is served
    where something below it is."""
    described = (await local.client.get("/api/v1/openapi.json")).json()["paths"]
    address = re.compile(r"https?://(?:localhost|127\.0\.0\.1):8642(/[\w./-]*\w)")
    documents = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    found = {path for document in documents for path in address.findall(document.read_text())}
    assert "/api/v1/openapi.json" in found, "the test can fail"
    for path in found:
        if not any(each == path or each.startswith(f"{path}/") for each in described):
            assert (await local.client.get(path)).status_code == 200, path


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_an_action_that_no_job_knows_is_no_id(local: Platform, method: str) -> None:
    reply = await local.client.request(method, "/api/v1/jobs/demo:delete")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
    assert "A job knows no action 'delete'" in reply.json()["detail"]
