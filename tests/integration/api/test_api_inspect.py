"""`POST /jobs:inspect`: the report of a job's data before it is submitted, by the trainer's own tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, platform, until
from tests.integration.api.test_api_files import taken_in, upload

from muster.api.data.inspections import service as inspections
from muster.api.data.inspections.service import DataInspections
from muster.api.data.tool import ToolEnd

PATH = "/api/v1/jobs:inspect"
SAID = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]})


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state") as running:
        yield running


def job(source: str, **data: Any) -> dict[str, Any]:
    made = document("chat")
    made["spec"]["training"] |= {
        "task": "sft",
        "data": {"train": [{"source": source}], "sequenceLength": 64, **data},
        "batch": {"tokensPerStep": 64, "microBatch": 1},
        "length": {"epochs": 1},
    }
    made["spec"]["gang"] = {"nodes": 1}
    return made


async def report_of(here: Platform, body: dict[str, Any]) -> Any:
    async def ask() -> Any:
        reply = await here.client.post(PATH, json=body)
        assert reply.status_code in (200, 202), reply.text
        assert reply.status_code == 200 or reply.json() == {"state": "reading"}
        return reply.json().get("report")

    return await until(ask, "the report", seconds=200.0)


async def test_uploaded_data_are_shown_before_a_job_is_submitted(here: Platform) -> None:
    file = await taken_in(here, (await upload(here, f"{SAID}\n".encode() * 50))["id"])
    found = await report_of(here, job(file["id"]))
    (source,) = found["sources"]
    assert (source["documents"], source["duplicates"], source["format"]) == (50, 49, "openai-chat")
    assert source["source"] == file["id"]
    learnt = [each["text"] for each in found["shown"][0]["stretches"] if each["learnt"]]
    assert "hello" in learnt[0]
    assert "hi" not in learnt[0]
    assert (await here.get("/jobs"))["items"] == []


async def test_what_the_trainer_refuses_is_refused_with_its_words(here: Platform) -> None:
    words = b"".join(json.dumps({"text": f"{n}"}).encode() + b"\n" for n in range(20))
    file = await taken_in(here, (await upload(here, words, name="words.jsonl"))["id"])
    body = job(file["id"], train=[{"source": file["id"], "format": "openai-chat"}])

    async def ask() -> Any:
        reply = await here.client.post(PATH, json=body)
        return None if reply.status_code == 202 else reply

    reply = await until(ask, "the refusal", seconds=200.0)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_job"), reply.text
    (fault, *_) = reply.json()["errors"]
    assert fault["path"] == "spec.training.data"
    assert f"{file['id']}, line 1" in fault["message"], fault


async def test_the_api_reads_on_somebodys_word_only_what_is_known_to_be_theirs(
    here: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in a folder that a project may read would show the platform's own token as a sample."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "words.txt").symlink_to(here.state.admin_token)
    limits = {"limits": {"dataPrefixes": [f"file://{folder}", "s3://data/nlp"]}}
    assert (await here.client.put("/api/v1/projects/default", json=limits)).status_code == 200

    async def away(*_: Any, **__: Any) -> ToolEnd:
        return ToolEnd(83, b"", b'{"error": "s3://data is away"}')

    monkeypatch.setattr(inspections, "run_module", away)
    for source, code in (
        (f"file://{folder}/*.txt", "inspection_unavailable"),
        ("s3://data/nlp/chat.jsonl", "storage_unavailable"),  # it was asked
        ("s3://data/cv/chat.jsonl", "invalid_job"),
        ("https://internal.example/chat.jsonl", "invalid_job"),
    ):
        reply = await here.client.post(PATH, json=job(source))
        assert reply.json()["code"] == code, reply.text
        assert code != "inspection_unavailable" or "training.data.train[0].source" in reply.json()["detail"]


async def test_who_can_not_look_says_why(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    body = document("texts")

    async def code() -> tuple[int, str, str]:
        reply = await here.client.post(PATH, json=body)
        here.services[DataInspections]._looks.clear()
        return reply.status_code, reply.json()["code"], reply.json()["detail"]

    monkeypatch.setattr(inspections, "available", lambda: False)
    assert (await code())[:2] == (424, "inspection_unavailable")
    monkeypatch.setattr(inspections, "available", lambda: True)

    async def hangs(*_: Any, **__: Any) -> ToolEnd:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(inspections, "run_module", hangs)
    with monkeypatch.context() as impatient:
        impatient.setattr(inspections, "SECONDS_MAX", 0.1)
        status, kind, detail = await code()
    assert (status, kind) == (424, "inspection_unavailable")
    assert "longer than 0.1 s" in detail

    for ended, expected in (
        (ToolEnd(-9, b"", b""), (424, "inspection_unavailable")),
        (ToolEnd(83, b"", b'{"error": "s3://a is away"}'), (503, "storage_unavailable")),
        (ToolEnd(1, b"", b"Traceback"), (424, "inspection_unavailable")),
    ):

        async def ends(*_: Any, ended: ToolEnd = ended, **__: Any) -> ToolEnd:
            return ended

        monkeypatch.setattr(inspections, "run_module", ends)
        assert (await code())[:2] == expected


async def test_the_tool_does_not_know_what_is_the_apis_own(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_DATABASE", "postgresql://secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen: dict[str, str] = {}

    async def told(*_: Any, environment: dict[str, str], **__: Any) -> ToolEnd:
        seen.update(environment)
        return ToolEnd(-9, b"", b"")

    monkeypatch.setattr(inspections, "run_module", told)
    of_the_hub = document("a")
    of_the_hub["spec"]["training"]["model"] = {"source": "hf://org/name@main"}
    assert (await here.client.post(PATH, json=of_the_hub)).status_code == 424
    assert "PATH" in seen
    assert not [name for name in seen if name.startswith(("MUSTER_", "HF_TOKEN"))]
