"""OpenAI's own client against /v1/files and /v1/uploads: what it sends is kept, read through, learnt from, deleted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration.api.openai_house import openai_platform, preference_file, uid_of, without_pauses
from tests.integration.api.platform import Platform, until

from muster.api.data.files.arrivals import FilePlaces, drop_expired

__all__ = ["without_pauses"]

House = tuple[Platform, openai.AsyncOpenAI]
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
DATA = f"{json.dumps(CHAT)}\n".encode() * 60


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with openai_platform(tmp_path) as both:
        yield both


async def create(client: openai.AsyncOpenAI, data: bytes = DATA, name: str = "chat.jsonl", **more: Any) -> Any:
    return await client.files.create(**{"file": (name, data), "purpose": "fine-tune", **more})


async def read_through(client: openai.AsyncOpenAI, file_id: str) -> Any:
    async def ask() -> Any:
        found = await client.files.retrieve(file_id)
        return found if found.status != "uploaded" else None

    return await until(ask, "the check of a file")


async def test_a_file_is_uploaded_trained_on_followed_and_deleted(house: House) -> None:
    here, client = house
    before = time.time()
    made = await create(client, expires_after={"anchor": "created_at", "seconds": 3_600})
    assert (made.object, made.filename, made.purpose, made.bytes) == ("file", "chat.jsonl", "fine-tune", len(DATA))
    # Named at once, as programs do that wait for nothing: the job is made when the file was read through.
    job = await client.fine_tuning.jobs.create(model="tiny", training_file=made.id)
    assert (job.training_file, job.x_chosen[0]) == (made.id, "n_epochs 3, for 60 examples")  # type: ignore[attr-defined]
    found = await client.files.retrieve(made.id)
    assert (found.status, found.x_format, found.x_samples) == ("processed", "openai-chat", 60)  # type: ignore[attr-defined]
    assert found.x_tokens_estimated == 60 * len("hi" + "hello") / 4  # type: ignore[attr-defined]
    assert found.expires_at is not None
    assert before + 3_600 <= found.expires_at + 1 <= time.time() + 3_602
    source = (await here.get(f"/jobs/{uid_of(job)}"))["spec"]["training"]["data"]["train"][0]
    assert source["source"] == made.id
    assert (await client.files.content(made.id)).content == DATA
    assert (await client.fine_tuning.jobs.list_events(job.id)).data
    here.commit(uid_of(job), 20)
    assert [each.step_number for each in (await client.fine_tuning.jobs.checkpoints.list(job.id)).data] == [20]
    with pytest.raises(openai.ConflictError) as refused:
        await client.files.delete(made.id)
    assert refused.value.code == "file_in_use"
    await here.finish(uid_of(job))
    assert (await client.files.delete(made.id)).deleted is True
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)


async def test_a_project_that_is_not_there_is_said_to_an_admin_too(house: House) -> None:
    _, client = house
    with pytest.raises(openai.NotFoundError, match="There is no project 'axl6'"):
        await create(client, extra_headers={"OpenAI-Project": "axl6"})


@pytest.mark.long
async def test_files_are_listed_page_by_page_in_either_order(house: House) -> None:
    _, client = house
    ids = [(await create(client, DATA[: 100 + n], f"{n}.txt", purpose="user_data")).id for n in range(5)]
    await client.uploads.create(bytes=9, filename="later.txt", mime_type="text/plain", purpose="user_data")
    assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
    assert [file.id async for file in client.files.list(purpose="evals")] == []
    page = await client.files.list(limit=2, after=ids[3])
    assert [file.id for file in page.data] == [ids[2], ids[1]]
    for param, wrong in (("after", {"after": "file-none"}), ("limit", {"limit": 0})):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.list(**wrong)  # type: ignore[arg-type]
        assert refused.value.param == param


async def test_a_missing_upload_is_called_as_its_caller_called_it(house: House) -> None:
    _, client = house
    for act in (
        lambda: client.uploads.parts.create("upload_x", data=b"{}"),
        lambda: client.uploads.complete("upload_x", part_ids=["part_0"]),
        lambda: client.uploads.cancel("upload_x"),
    ):
        with pytest.raises(openai.NotFoundError, match="no upload with the id 'upload_x'"):
            await act()


async def test_what_nothing_can_be_learnt_from_says_so(house: House, tmp_path: Path) -> None:
    _, client = house
    bad = await create(client, DATA + b"oops\n", "bad.jsonl")
    found = await read_through(client, bad.id)
    assert (found.status, found.status_details.startswith("bad.jsonl, line 61")) == ("error", True)
    pairs = await create(client, Path(preference_file(tmp_path).removeprefix("file://")).read_bytes())
    other = await create(client, purpose="user_data")
    upload = await client.uploads.create(bytes=9, filename="a.jsonl", mime_type="", purpose="fine-tune")
    for file_id, words in (
        (bad.id, "line 61"),
        (pairs.id, "format preference is not for task sft"),
        (other.id, "has the purpose user_data"),
        (upload.id.replace("upload_", "file-"), "has not arrived"),
        ("file-000000000000000000000000", "there is no file"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            await client.fine_tuning.jobs.create(model="tiny", training_file=file_id)
        assert refused.value.param == "training_file"
    dpo: Any = {"type": "dpo"}
    job = await client.fine_tuning.jobs.create(model="org/whole", training_file=pairs.id, method=dpo)
    assert job.method.type == "dpo"  # type: ignore[union-attr]


async def test_every_wrong_field_is_named(house: House) -> None:
    here, client = house
    whole = {"filename": "a.jsonl", "bytes": 10, "mime_type": "application/jsonl", "purpose": "fine-tune"}
    for param, more in (
        ("purpose", {"purpose": "fine-tuned"}),
        ("purpose", {"purpose": "assistants"}),
        ("expires_after.seconds", {"expires_after": {"anchor": "created_at", "seconds": 1}}),
        ("expires_after.anchor", {"expires_after": {"anchor": "now", "seconds": 3_600}}),
        ("suffix", {"extra_body": {"suffix": "x"}}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(client, **more)
        assert refused.value.param == param, refused.value.message
        with pytest.raises(openai.BadRequestError) as refused:
            await client.uploads.create(**{**whole, **more})  # type: ignore[arg-type]
        assert refused.value.param == param, refused.value.message
    for param, data, name in (("file", b"", "a.jsonl"), ("file", DATA, "a" * 300)):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(client, data, name)
        assert refused.value.param == param
    for param, value in (("bytes", 0), ("bytes", "ten"), ("filename", "../a.jsonl"), ("filename", "")):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.uploads.create(**{**whole, param: value})  # type: ignore[arg-type]
        assert refused.value.param == param
    with pytest.raises(openai.APIStatusError) as large:
        await client.uploads.create(**{**whole, "bytes": 10**15})  # type: ignore[arg-type]
    assert (large.value.status_code, large.value.param) == (413, "bytes")
    for body, kind, code in (
        (b"no form", "text/plain", "unsupported_media_type"),
        (b"--x\r\n", "multipart/form-data; boundary=x", "invalid_document"),
        (b"--x--\r\n", "multipart/form-data; boundary=x", "invalid_request"),
    ):
        reply = await here.client.post("/v1/files", content=body, headers={"content-type": kind})
        assert reply.json()["code"] == code, reply.text
    both = {"purpose": "fine-tune", "expires_after": "{}", "expires_after[seconds]": "3600"}
    reply = await here.client.post("/v1/files", data=both, files={"file": ("a.jsonl", DATA)})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "expires_after.anchor"), reply.text
    assert (await client.files.list()).data == []
    assert list(here.state.uploads.iterdir()) == []


async def test_an_upload_in_parts_is_put_together_as_its_sender_says(house: House) -> None:
    here, client = house
    size = len(DATA)
    upload = await client.uploads.create(
        bytes=size, filename="chat.jsonl", mime_type="application/jsonl", purpose="fine-tune"
    )
    assert (upload.status, upload.object, upload.file) == ("pending", "upload", None)
    cuts = [(2 * size // 3, size), (0, size // 3), (size // 3, 2 * size // 3), (0, 5)]
    parts = await asyncio.gather(
        *(client.uploads.parts.create(upload.id, data=DATA[start:stop]) for start, stop in cuts)
    )
    ids = [part.id for part in parts]
    assert {part.upload_id for part in parts} == {upload.id}
    for param, wrong in (
        ("part_ids", {"part_ids": [ids[1], ids[2]]}),
        ("part_ids", {"part_ids": [ids[1], ids[2], "part_other"]}),
        ("part_ids", {"part_ids": [ids[1], ids[1], ids[1]]}),
        ("part_ids", {"part_ids": []}),
        ("md5", {"part_ids": [ids[1], ids[2], ids[0]], "md5": "0" * 32}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.uploads.complete(upload.id, **wrong)  # type: ignore[arg-type]
        assert refused.value.param == param
    md5 = hashlib.md5(DATA, usedforsecurity=False).hexdigest()
    order = [ids[1], ids[2], ids[0]]
    done, again = await asyncio.gather(*(client.uploads.complete(upload.id, part_ids=order, md5=md5) for _ in range(2)))
    assert (done.status, done.id) == ("completed", upload.id)
    assert done.file is not None
    assert again.file is not None
    assert again.file.id == done.file.id
    assert (await read_through(client, done.file.id)).status == "processed"
    assert (await client.files.content(done.file.id)).content == DATA
    assert [file.id async for file in client.files.list()] == [done.file.id]
    assert list(here.state.uploads.iterdir()) == []
    with pytest.raises(openai.ConflictError):
        await client.uploads.cancel(upload.id)


@pytest.mark.long
async def test_an_upload_is_cancelled_or_dropped_with_its_parts(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    here, client = house
    await here.no_more_housekeeping()  # which would drop what is late, too
    said: Any = {"bytes": 10, "filename": "a.txt", "mime_type": "text/plain", "purpose": "user_data"}
    upload = await client.uploads.create(**said)
    for data, param in ((b"12345678901", "data"), (b"", "data")):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.uploads.parts.create(upload.id, data=data)
        assert (refused.value.param, refused.value.status_code) == (param, 413 if data else 400)
    for _ in range(3):
        await client.uploads.parts.create(upload.id, data=b"1234567890")
    with pytest.raises(openai.APIStatusError) as full:  # who sends more than every part three times fills the disk
        await client.uploads.parts.create(upload.id, data=b"1")
    assert full.value.status_code == 413
    assert (await client.uploads.cancel(upload.id)).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        await client.uploads.parts.create(upload.id, data=b"1")
    assert list(here.state.uploads.iterdir()) == []
    monkeypatch.setattr("muster.api.data.files.service.UPLOAD_SECONDS", -1.0)
    late = await client.uploads.create(**said)
    await client.uploads.parts.create(late.id, data=b"1")
    (here.state.uploads / "spool-of-a-killed-request").write_bytes(b"1")
    monkeypatch.setattr("muster.api.data.files.arrivals.ELSEWHERE_SECONDS", -60.0)
    await drop_expired(here.services.database, here.services[FilePlaces])
    assert list(here.state.uploads.iterdir()) == []


async def test_a_retry_finds_the_file_that_its_first_try_made(house: House, without_pauses: None) -> None:
    _, client = house
    client.cutting.lose = 2  # type: ignore[attr-defined]
    first = await create(client)
    assert [file.id async for file in client.files.list()] == [first.id]
    second = await create(client)
    assert second.id != first.id, "a request that is no retry is another file"
    client.cutting.lose = 1  # type: ignore[attr-defined]
    upload = await client.uploads.create(bytes=9, filename="a.txt", mime_type="", purpose="user_data")
    parts = await client.uploads.parts.create(upload.id, data=b"123456789")
    client.cutting.lose = 2  # type: ignore[attr-defined]
    done = await client.uploads.complete(upload.id, part_ids=[parts.id])
    assert done.status == "completed"
    assert len([file async for file in client.files.list()]) == 3


@pytest.mark.long
async def test_a_form_may_have_its_file_first_and_a_name_without_an_ending(house: House) -> None:
    """As OpenAI's other clients send them."""
    here, client = house
    head = 'content-disposition: form-data; name="file"; filename="C:\\data\\upload"\r\ncontent-type: text/plain'
    tail = '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
    body = f"--b\r\n{head}\r\n\r\n".encode() + DATA + b"\r\n" + tail.encode()
    kind = {"content-type": "multipart/form-data; boundary=b"}

    async def byte_by_byte() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 7):
            yield body[at : at + 7]

    for content in (body, byte_by_byte()):
        reply = await here.client.post("/v1/files", content=content, headers=kind)
        assert reply.status_code == 200, reply.text
        made = reply.json()
        assert (made["filename"], made["bytes"]) == ("upload.jsonl", len(DATA))
        assert (await client.files.content((await read_through(client, made["id"])).id)).content == DATA
