"""Commits on pages: read again, fetched as a model, trained further; and the report of a job's data."""

from __future__ import annotations

import html
import re
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.api.platform import Platform, platform
from tests.integration.web.pages import Browser, data_report, lived, notes

from muster.api.data.exports.making import ExportProgress
from muster.web.app import create_app
from muster.words.checkpoint import FileEntry
from muster.words.data_report import DATA_REPORT_KEY
from muster.words.samples import Sample, Samples, samples_key

SHARD = b"weights" * 1000
HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app) as here:
        yield here


@pytest.fixture
def browser(here: Platform) -> Browser:
    return Browser(here.client)


async def test_a_commit_is_read_again(here: Platform, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    # As S3 servers that are verified by ETags on arrival, and of what they hold say nothing later.
    monkeypatch.setattr("muster.storage.file_store.FileStore.verify", lambda store, entry: None)
    uid = await lived(here)
    entry = FileEntry(key="step-7/shard", bytes=len(SHARD), checksum=f"{zlib.crc32(SHARD):08x}")
    here.commit(uid, 7, files=(entry,))
    shard = here.state.checkpoints / uid / entry.key
    shard.parent.mkdir(parents=True)
    shard.write_bytes(SHARD)
    form = {"form_token": await browser.form_token(f"/jobs/{uid}/checkpoints/7")}
    told = []
    for data in (SHARD, SHARD[:-1] + b"?", SHARD[:-1]):
        shard.write_bytes(data)
        reply = await browser.post(f"/jobs/{uid}/checkpoints/7/verify", form)
        assert (reply.status_code, reply.headers["location"]) == (303, f"/jobs/{uid}/checkpoints/7")
        told += notes(await browser.get(reply.headers["location"]))
    assert told[0].startswith("Every file of step 7 is as it was committed (7,000 bytes in")
    assert "The checkpoint of step 7 is damaged" in told[1]
    assert "checksum" in told[1]
    assert "holds 6999 bytes, not 7000" in told[2]
    assert (await browser.post(f"/jobs/{uid}/checkpoints/8/verify", form)).status_code == 404


async def test_a_model_is_downloaded_once_it_is_made(
    here: Platform, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = await lived(here)
    address, half_made = f"/jobs/{uid}/checkpoints/120/export", ExportProgress(done=1 << 20, total=4 << 20)
    monkeypatch.setattr("muster.api.data.exports.routes.WAIT_SECONDS", 0.01)
    monkeypatch.setattr("muster.api.data.exports.routes._made_here", lambda *_: (half_made, True))
    making = await browser.get(address)
    assert (making.status_code, making.headers["refresh"]) == (202, "2")
    assert "1.0 MiB of 4.0 MiB" in making.text
    monkeypatch.undo()
    folder = here.state.exports / uid / "step-120-transformers-keep"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    fetched = await browser.get(address)
    assert fetched.status_code == 200
    assert fetched.headers["content-disposition"].startswith("attachment")
    assert b"config.json" in fetched.content


async def test_a_new_job_begins_at_a_commit(here: Platform, browser: Browser) -> None:
    uid = await lived(here)
    commit = html.unescape((await browser.get(f"/jobs/{uid}/checkpoints/80")).text)
    assert f'href="/submit?model={uid}&step=80"' in commit
    page = html.unescape((await browser.get(f"/submit?model={uid}&step=80")).text)
    assert "from:\n        job: llama-sft\n        step: 80" in page
    assert (await browser.get("/submit?model=nowhere")).status_code == 404


async def test_the_data_are_told_with_what_the_loss_counts(here: Platform, browser: Browser) -> None:
    uid = await lived(here)
    kept = here.state.checkpoints / uid / DATA_REPORT_KEY
    kept.write_text(data_report(HOSTILE).model_dump_json(by_alias=True))
    page = (await browser.get(f"/jobs/{uid}/data")).text
    assert '<ins class="learnt"><span class="visually-hidden">In the loss: </span>an answer</ins>' in page
    assert "5 tokens, 2 in the loss, 3 of padding" in page
    assert "410 (41.0%)" in page
    assert "<script>alert" not in page
    assert "\x1b" not in page
    kept.write_text("{")
    assert "There is no report yet" in (await browser.get(f"/jobs/{uid}/data")).text


async def test_samples_are_a_table_of_prompts_by_steps(here: Platform, browser: Browser) -> None:
    uid = await lived(here)
    for step, texts in ((40, {"a gang?": "no", "<i>an attempt?": "so"}), (80, {"a gang?": HOSTILE})):
        written = tuple(Sample(prompt=prompt, text=words, finished=False) for prompt, words in texts.items())
        file = here.state.checkpoints / uid / samples_key(step)
        file.parent.mkdir(exist_ok=True)
        file.write_text(Samples(step=step, attempt=1, at=1.0, samples=written).model_dump_json(by_alias=True))
    page = (await browser.get(f"/jobs/{uid}/samples")).text
    assert re.findall(r'<th scope="col">(.*?)</th>', page) == ["Prompt", "Step 40", "Step 80"]
    rows = re.findall(r'<th scope="row" class="prompt">(.*?)</th>(.*?)</tr>', page, re.DOTALL)
    assert [prompt for prompt, _ in rows] == ["a gang?", "&lt;i&gt;an attempt?"]
    assert re.findall(r"<td>([^<]+)<", rows[0][1]) == ["no", "&lt;script&gt;alert(1)&lt;/script&gt;"]
    assert "not asked" in rows[1][1]
    assert "The newest 1 of 2 evaluations." in html.unescape((await browser.get(f"/jobs/{uid}/samples?last=1")).text)


async def test_a_chat_offers_the_checkpoints_or_the_command(tmp_path: Path, here: Platform, browser: Browser) -> None:
    uid = await lived(here)
    page = (await browser.get(f"/jobs/{uid}/chat?step=80")).text
    assert re.findall(r'<option value="(\d*)"( selected)?>', page)[:2] == [("120", ""), ("80", " selected")]
    assert f"/jobs/{uid}/chat?step=120" in (await browser.get(f"/jobs/{uid}/checkpoints")).text
    waiting = (await here.submit("other"))["id"]
    assert "no checkpoint to ask yet" in (await browser.get(f"/jobs/{waiting}/chat")).text
    async with platform(tmp_path / "other", make=create_app, chat_workers=0) as bare:
        uid = await lived(bare)
        page = html.unescape((await Browser(bare.client).get(f"/jobs/{uid}/chat")).text)
    assert "This server answers no prompts: MUSTER_API_CHAT_WORKERS is 0." in page
    assert 'muster generate llama-sft --prompt "Once upon a time" --step 120' in page
    assert "data-chat" not in page
