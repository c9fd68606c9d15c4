"""`/`, `/docs` and `/api/v1/docs`: nothing is fetched from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, platform
from tests.tidy.repository import ROOT

from muster.api.core.http import documents


@pytest.fixture
async def local(tmp_path: Path) -> Any:
    async with platform(tmp_path / "state") as here:
        yield here


async def test_the_root_says_what_this_is_and_where(local: Platform) -> None:
    places = (await local.client.get("/")).json()
    assert places["name"] == "Muster"
    for key in ("docs", "reference", "openapi", "health", "metrics"):
        assert (await local.client.get(places[key], follow_redirects=True)).status_code == 200, key
    assert places["ready"] == "/readyz"
    await local.ready()  # not at once: the mirror may still read the cluster
    page = await local.client.get("/", headers={"accept": "text/html,*/*"})
    assert '<a href="/docs">' in page.text


async def test_the_docs_name_every_operation_and_fetch_nothing(local: Platform) -> None:
    page = await local.client.get("/api/v1/docs")
    assert page.headers["content-type"].startswith("text/html")
    described = (await local.client.get("/api/v1/openapi.json")).json()
    for methods in described["paths"].values():
        for operation in methods.values():
            assert f'id="{operation["operationId"]}"' in page.text
    assert not re.search(r"<script|<link|<iframe|<img|src=|@import|url\(", page.text)


async def test_without_a_site_the_page_of_documents_says_how_to_build_one(
    local: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "SITE", tmp_path / "none")
    page = await local.client.get("/docs")
    assert (page.status_code, "make docs" in page.text, 'href="/api/v1/docs"' in page.text) == (200, True, True)
    missing = await local.client.get("/docs/index.html")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


async def test_the_site_is_served_with_the_scripts_of_its_pages_and_no_others(
    local: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "_static").mkdir(parents=True)
    (site / "index.html").write_text("<script>dark()</script><script src=a.js></script><p>Tutorial</p>")
    (site / "_static" / "a.js").write_text("search()")
    (site / "llms.txt").write_text("# Muster\n")
    monkeypatch.setattr(documents, "SITE", site)
    moved = await local.client.get("/docs")
    assert (moved.status_code, moved.headers["location"]) == (307, "/docs/index.html")
    page = await local.client.get("/docs/")
    digest = base64.b64encode(hashlib.sha256(b"dark()").digest()).decode()
    assert page.text.endswith("<p>Tutorial</p>")
    assert f"script-src 'self' 'sha256-{digest}';" in page.headers["content-security-policy"]
    script = await local.client.get("/docs/_static/a.js")
    assert (script.text, script.headers["content-type"].partition(";")[0]) == ("search()", "text/javascript")
    overview = await local.client.get("/llms.txt", follow_redirects=True)
    assert (overview.text, overview.url.path) == ("# Muster\n", "/docs/llms.txt")


@pytest.mark.parametrize("path", ["../secret", "%2e%2e/secret", "..%2fsecret", "link", "%00", "_static", "none.html"])
async def test_nothing_beside_the_site_is_served(
    local: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    site = tmp_path / "site"
    (site / "_static").mkdir(parents=True)
    (tmp_path / "secret").write_text("a token")
    (site / "link").symlink_to(tmp_path / "secret")
    monkeypatch.setattr(documents, "SITE", site)
    answer = await local.client.get(f"/docs/{path}")
    assert (answer.status_code, "a token" in answer.text) == (404, False)


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
