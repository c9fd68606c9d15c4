"""`/compare`, `/fleet` and the curves that pages read, as a browser without JavaScript sees them."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.api.platform import Platform, platform
from tests.integration.web.pages import Browser, lived

from muster.web.app import create_app
from muster.words.fleet import FleetReport, NodeNotice, NodeReport


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app) as running:
        yield running


async def test_jobs_are_compared_by_name_or_id_and_those_that_are_not_there_are_said(here: Platform) -> None:
    browser = Browser(here.client)
    one = await lived(here, "base-run")
    two = (await here.submit("other-run", priority=3))["id"]
    page = await browser.get(f"/compare?jobs=base-run,{two}&jobs=%3Cb%3Enobody%3C/b%3E%00,base-run")
    assert page.status_code == 200
    assert "There is no job &lt;b&gt;nobody" in page.text
    assert "<b>nobody" not in page.text
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', page.text, re.DOTALL)
    sources = json.loads(data)
    assert [(each["name"], each["src"]) for each in sources] == [
        ("base-run", f"/jobs/{one}/curves"),
        ("other-run", f"/jobs/{two}/curves"),
    ]
    assert f'href="/compare?jobs={one}%2C{two}"' in page.text, "a link that means the same tomorrow"
    assert 'name="jobs" value="base-run, other-run, &lt;b&gt;nobody' in page.text, "names, and not ids"
    newer = (await here.submit("base-run-2"))["id"]
    blanks = await browser.get(f"/compare?jobs=base-run+{newer}%0Aother-run")
    assert 'value="base-run, base-run-2, other-run"' in blanks.text
    settings = html.unescape(page.text.split('id="settings-title"')[-1])
    assert "<code>priority</code>" in settings
    assert "muster-1m" not in settings, "what they share"
    assert (await browser.get(sources[0]["src"])).json() == await here.get(f"/jobs/{one}/curves")
    assert (await browser.get("/jobs/nobody/curves")).status_code == 404
    assert "Nothing to compare yet" in (await browser.get("/compare")).text


async def test_the_fleet_tells_who_waits_and_what_was_recovered(here: Platform) -> None:
    browser = Browser(here.client)
    uid = await lived(here, "base-run", message="<i>rank 1</i> was killed")
    waiting = (await here.submit("other-run"))["id"]
    page = await browser.get("/fleet")
    assert page.status_code == 200
    assert f'<a href="/jobs/{waiting}">other-run</a>' in page.text
    assert f'<a href="/jobs/{uid}#attempt-1">base-run</a>' in page.text
    assert "&lt;i&gt;rank 1" in page.text
    assert "has told nothing of its nodes yet" in html.unescape(page.text)
    assert "Lost and trained again" in page.text
    notice = NodeNotice(kind="spot_notice", at=time.time(), message="taken <b>back</b>", source="imds")
    spot = {"pool": "spot-a", "capacity": "spot", "instance_type": "p5", "gpus": 8}
    nodes = [NodeReport(name="node-0", **spot), NodeReport(name="node-9", **spot, unfit="drained", notices=(notice,))]
    here.cluster.write_nodes(FleetReport(at=time.time(), nodes=tuple(nodes)))
    page = await browser.get("/fleet")
    for words in ("held by default/base-run", "16 GPUs free", "drained", "taken &lt;b&gt;back&lt;/b&gt;", "tile-unfit"):
        assert words in page.text, words
