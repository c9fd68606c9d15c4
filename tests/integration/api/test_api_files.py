"""Files: uploaded at once or by tus, cut and gone on with, put away by what they hold, read through, named by jobs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from tests.integration.api.people import People, settle
from tests.integration.api.platform import Platform, document, platform, until
from tests.processes import is_alive
from tests.s3_servers import BUCKET, moto_server

from muster.api.data.files import arrivals, repository, service, staging
from muster.api.data.files.arrivals import FilePlaces, drop_expired
from muster.api.data.tool import ToolEnd
from muster.local.cluster import LocalCluster
from muster.words.base import dump_json
from muster.words.state_folder import StateFolder
from muster.words.times import epoch_seconds

TUS = {"tus-resumable": "1.0.0"}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
DATA = b"".join(json.dumps(CHAT).encode() + b"\n" for _ in range(500))


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state") as running:
        yield running


async def upload(here: Platform, data: Any = DATA, expect: int = 201, **query: Any) -> Any:
    query = {"name": "chat.jsonl", "purpose": "fine-tune", **query}
    reply = await here.client.post("/api/v1/files", params=query, content=data)
    assert reply.status_code == expect, reply.text
    return reply.json()


async def taken_in(here: Platform, file_id: str) -> Any:
    async def ask() -> Any:
        found = await here.get(f"/files/{file_id}")
        return found if found["status"] in ("ready", "failed") else None

    return await until(ask, "the check of a file")


def metadata(**values: str) -> str:
    return ",".join(f"{key} {base64.b64encode(value.encode()).decode()}" for key, value in values.items())


async def begin(here: Platform, size: int = len(DATA), expect: int = 201, **values: str) -> httpx2.Response:
    values = {"filename": "chat.jsonl", "purpose": "fine-tune", **values}
    headers = TUS | {"upload-length": str(size), "upload-metadata": metadata(**values)}
    reply = await here.client.post("/api/v1/files", headers=headers)
    assert reply.status_code == expect, reply.text
    return reply


async def send(here: Platform, place: str, offset: int, data: Any, **headers: str) -> httpx2.Response:
    said = TUS | {"upload-offset": str(offset), "content-type": "application/offset+octet-stream", **headers}
    return await here.client.patch(place, headers=said, content=data)


async def offset_of(here: Platform, place: str) -> int:
    reply = await here.client.head(place, headers=TUS)
    assert reply.status_code == 200
    return int(reply.headers["upload-offset"])


@pytest.mark.both_databases
async def test_a_file_is_uploaded_checked_read_and_deleted(here: Platform) -> None:
    made = await upload(here, sha256=hashlib.sha256(DATA).hexdigest())
    found = await taken_in(here, made["id"])
    expected = {"status": "ready", "bytes": len(DATA), "format": "openai-chat", "samples": 500, "fault": None}
    expected["tokensEstimated"] = 500 * len("hi" + "hello") // 4
    assert {key: found[key] for key in expected} == expected
    assert found["sha256"] == hashlib.sha256(DATA).hexdigest()
    assert [each["id"] for each in (await here.get("/files", purpose="fine-tune"))["items"]] == [made["id"]]
    content = f"/api/v1/files/{made['id']}/content"
    assert (await here.client.get(content)).content == DATA
    for asked, part in (("bytes=10-19", DATA[10:20]), ("bytes=-5", DATA[-5:]), ("bytes=20000-", DATA[20_000:])):
        reply = await here.client.get(content, headers={"range": asked})
        assert (reply.status_code, reply.content) == (206, part)
    beyond = await here.client.get(content, headers={"range": f"bytes={len(DATA)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(DATA)}")
    assert (await here.client.delete(f"/api/v1/files/{made['id']}")).status_code == 204
    assert (await here.client.get(content)).status_code == 404
    assert list(here.state.files.rglob("*.jsonl")) == []
    assert list(here.state.uploads.iterdir()) == []


async def test_equal_files_share_their_bytes_until_the_last_is_deleted(local: Platform) -> None:
    one, two = [await taken_in(local, (await upload(local, name=name))["id"]) for name in ("a.jsonl", "b.jsonl")]
    assert len(list(local.state.files.rglob("*.jsonl"))) == 1
    await local.client.delete(f"/api/v1/files/{one['id']}")
    assert (await local.client.get(f"/api/v1/files/{two['id']}/content")).content == DATA
    await local.client.delete(f"/api/v1/files/{two['id']}")
    assert list(local.state.files.rglob("*.jsonl")) == []


class Cut(Exception):
    """The connection of a sender breaks."""


async def test_an_upload_cut_at_every_tenth_is_gone_on_with_by_another_process(tmp_path: Path) -> None:
    """Each half by a platform of its own, each tenth by what knows nothing of what was there before."""
    size, sent, place = len(DATA), 0, ""
    for half in (range(1, 6), range(6, 11)):
        async with platform(tmp_path / "state") as here:
            place = place or (await begin(here)).headers["location"]
            for tenth in half:
                here.services[FilePlaces].staging._digests.clear()
                assert await offset_of(here, place) == sent
                stop = size * tenth // 10

                async def tenth_of_it(start: int = sent, stop: int = stop) -> AsyncIterator[bytes]:
                    yield DATA[start : (start + stop) // 2]
                    yield DATA[(start + stop) // 2 : stop]
                    if stop < size:
                        raise Cut

                with contextlib.suppress(Cut):
                    await send(here, place, sent, tenth_of_it())
                sent = stop
            if sent == size:
                found = await taken_in(here, place.rpartition("/")[2])
                assert (found["status"], found["sha256"]) == ("ready", hashlib.sha256(DATA).hexdigest())


async def test_replicas_that_share_the_folder_of_uploads_take_turns_at_one(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as one, platform(tmp_path / "state") as two:
        place, size = (await begin(one)).headers["location"], len(DATA)
        for tenth in range(10):
            here, other = (one, two) if tenth % 2 else (two, one)
            start, stop = size * tenth // 10, size * (tenth + 1) // 10
            assert await offset_of(here, place) == start
            assert (await send(here, place, start, DATA[start:stop])).status_code == 204
            assert stop == size or await offset_of(other, place) == stop
        for here in (one, two):
            found = await taken_in(here, place.rpartition("/")[2])
            assert (found["status"], found["sha256"]) == ("ready", hashlib.sha256(DATA).hexdigest())
        assert list(one.state.uploads.iterdir()) == []


async def test_a_process_that_ends_between_arrival_and_check_is_followed_by_one_that_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("muster.api.data.files.arrivals.FileArrivals._check", dies)
        async with platform(tmp_path / "state") as here:
            made = await upload(here)
            key = StateFolder(tmp_path / "state").files / "default" / f"{hashlib.sha256(DATA).hexdigest()}.jsonl"

            async def put_away() -> bool:
                return key.exists()

            await until(put_away, "the move of the bytes")
            assert (await here.get(f"/files/{made['id']}"))["status"] == "checking"
    async with platform(tmp_path / "state") as here:
        assert (await taken_in(here, made["id"]))["status"] == "ready"


async def test_bytes_that_are_not_those_of_the_checksum_are_dropped(local: Platform) -> None:
    wrong = hashlib.sha256(b"other").digest()
    refused = await upload(local, expect=460, sha256=wrong.hex())
    assert (refused["code"], (await local.get("/files"))["items"]) == ("checksum_mismatch", [])
    place = (await begin(local)).headers["location"]
    said = {"upload-checksum": f"sha256 {base64.b64encode(wrong).decode()}"}
    assert (await send(local, place, 0, DATA[:100], **said)).status_code == 460
    assert await offset_of(local, place) == 0
    right = base64.b64encode(hashlib.md5(DATA[:100], usedforsecurity=False).digest()).decode()
    assert (await send(local, place, 0, DATA[:100], **{"upload-checksum": f"md5 {right}"})).status_code == 204
    assert await offset_of(local, place) == 100


async def test_what_was_not_compared_when_a_process_was_killed_is_not_kept(local: Platform) -> None:
    place = (await begin(local)).headers["location"]
    name = place.rpartition("/")[2]
    kept = local.services[FilePlaces].staging
    kept.path(name).write_bytes(DATA[:100])  # as a process leaves it that dies before it has compared
    (kept.folder / f"{name}.from").write_text("0")
    assert await offset_of(local, place) == 0
    assert (await send(local, place, 0, DATA)).headers["upload-offset"] == str(len(DATA))
    assert (await taken_in(local, name))["sha256"] == hashlib.sha256(DATA).hexdigest()


async def test_a_resumed_upload_is_compared_with_what_was_announced(tmp_path: Path) -> None:
    """The process that ends it has not seen its beginning, and reads it."""
    async with platform(tmp_path / "state") as here:
        place = (await begin(here, sha256="0" * 64)).headers["location"]
        await send(here, place, 0, DATA[:100])
    async with platform(tmp_path / "state") as here:
        assert (await send(here, place, 100, DATA[100:])).status_code == 204
        found = await taken_in(here, place.rpartition("/")[2])
    assert found["status"] == "failed"
    assert "was announced" in found["fault"]


async def test_the_later_of_two_senders_goes_on(local: Platform) -> None:
    """A client whose connection hangs comes back on another one, and must not wait for the first to time out."""
    place = (await begin(local)).headers["location"]
    arrived, never = asyncio.Event(), asyncio.Event()

    async def hangs() -> AsyncIterator[bytes]:
        yield DATA[: staging.BLOCK_BYTES]
        arrived.set()
        await never.wait()

    first = asyncio.create_task(send(local, place, 0, hangs()))
    await arrived.wait()

    async def later() -> Any:
        have = await offset_of(local, place)
        reply = await send(local, place, have, DATA[have:])
        return reply if reply.status_code == 204 else None

    await until(later, "the second sender")
    assert (await first).status_code == 409
    assert (await taken_in(local, place.rpartition("/")[2]))["sha256"] == hashlib.sha256(DATA).hexdigest()


async def test_what_can_not_be_kept_is_refused(local: Platform) -> None:
    for query, data, code, words in (
        ({"purpose": "fine-tuned"}, DATA, "invalid_parameter", "fine-tune"),
        ({"name": "../../etc/passwd"}, DATA, "invalid_parameter", "without a folder"),
        ({"name": ""}, DATA, "invalid_parameter", "must be a file's name"),
        ({}, b"", "invalid_parameter", "empty"),
        ({"sha256": "abc"}, DATA, "invalid_parameter", "64 hexadecimal digits"),
        ({"lifetimeSeconds": "0"}, DATA, "invalid_parameter", "number of seconds"),
        ({"project": "nobodys"}, DATA, "project_not_found", "nobodys"),
    ):
        asked = {"name": "a.jsonl", "purpose": "fine-tune", **query}
        reply = await local.client.post("/api/v1/files", params=asked, content=data)
        assert (reply.json()["code"], words in reply.text) == (code, True), reply.text
    assert (await local.get("/files"))["items"] == []
    assert not any(local.state.uploads.glob("*"))


async def test_a_hundred_gigabytes_are_refused_before_a_byte_where_there_is_no_room(
    local: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = local.services[FilePlaces].staging
    monkeypatch.setattr(kept, "room", lambda: 100 * 10**9)
    await begin(local, size=60 * 10**9)
    refused = (await begin(local, size=60 * 10**9, expect=507)).json()
    assert refused["code"] == "no_space"
    assert "has room for 37.3 GiB" in refused["detail"], "what is on its way counts"
    assert (await begin(local, size=2 * 10**12, expect=413)).json()["code"] == "file_too_large"


async def test_uploads_together_stay_within_what_their_volume_may_hold(tmp_path: Path) -> None:
    """Kubernetes evicts a pod whose emptyDir outgrows its sizeLimit, which the disk below it knows nothing of."""
    most = 64 << 10
    async with platform(tmp_path / "state", uploads_bytes_max="64Ki") as here:
        place = (await begin(here, size=40_000)).headers["location"]
        refused = (await begin(here, size=40_000, expect=507)).json()
        assert (refused["code"], "has room for 23.9 KiB" in refused["detail"]) == ("no_space", True), (
            "before a byte is sent"
        )

        async def unsized() -> AsyncIterator[bytes]:
            yield bytes(20_000)

        (here.state.uploads / "spool-of-a-request-that-came-beside-it").write_bytes(bytes(45_056))
        assert "has room for 0 B" in (await upload(here, unsized(), expect=507))["detail"]
        full = await send(here, place, 0, bytes(40_000))
        assert (full.status_code, full.json()["code"]) == (507, "no_space")
        assert "may hold 64.0 KiB (MUSTER_API_UPLOADS_BYTES_MAX): what has arrived is kept" in full.json()["detail"]
        assert sum(path.stat().st_blocks * 512 for path in here.state.uploads.iterdir()) <= most
        assert await offset_of(here, place) == 0, "and may be gone on with"


async def test_what_lies_on_another_replicas_disk_takes_no_room_and_is_given_up_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with platform(tmp_path / "state") as here:
        file_id = (await begin(here, size=60 * 10**6)).json()["id"]
        kept = here.services[FilePlaces].staging
        assert kept.missing({file_id: 60 * 10**6}) == 60 * 10**6
        kept.remove(file_id)
        assert kept.missing({file_id: 60 * 10**6}) == 0
        async with here.services.database.write() as session:
            row = await repository.get(session, file_id)
            assert row is not None
            row.status, row.key = "checking", f"{row.project}/{'0' * 64}.jsonl"  # what a replica left that is no more
        arrivals = here.services[FilePlaces].arrivals
        assert arrivals is not None
        await arrivals._take_in(file_id)
        assert (await here.get(f"/files/{file_id}"))["status"] == "checking", "for it may come back"
        monkeypatch.setattr("muster.api.data.files.arrivals.ELSEWHERE_SECONDS", -1.0)
        await arrivals._take_in(file_id)
        found = await here.get(f"/files/{file_id}")
        assert (found["status"], "upload it again" in found["fault"]) == ("failed", True)


async def test_a_projects_files_stay_within_its_limit(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", auth=True) as here:
        people = await settle(here, tmp_path / "state")
        await people.ask("admin", "PUT", "/projects/nlp", json={"limits": {"fileBytes": len(DATA) + 10}})
        asked = {"name": "a.jsonl", "purpose": "fine-tune", "project": "nlp"}

        async def put(content: Any) -> Any:
            return await people.ask("nlp-member", "POST", "/files", params=asked, content=content)

        async def unsized() -> AsyncIterator[bytes]:
            yield DATA

        assert (await put(DATA)).status_code == 201
        assert (await put(DATA)).json()["code"] == "file_too_large"
        assert (await put(unsized())).json()["code"] == "file_too_large", "nor without saying its size before"
        assert len((await people.ask("nlp-member", "GET", "/files")).json()["items"]) == 1


async def test_a_form_is_not_taken_for_the_file(local: Platform) -> None:
    form = {"files": {"file": ("chat.jsonl", DATA)}, "params": {"name": "chat.jsonl", "purpose": "fine-tune"}}
    refused = await local.client.post("/api/v1/files", **form)
    assert (refused.status_code, refused.json()["code"]) == (415, "unsupported_media_type")
    assert "--data-binary @FILE" in refused.json()["detail"]
    assert (await local.get("/files"))["items"] == []


async def test_data_that_can_not_be_learnt_from_says_its_first_bad_line(local: Platform) -> None:
    bad = DATA + b'{"messages": [{"role": "wizard", "content": "x"}]}\n' + b"oops\n"
    found = await taken_in(local, (await upload(local, bad))["id"])
    assert found["status"] == "failed"
    assert found["samples"] == 500
    assert found["fault"].startswith("chat.jsonl, line 501: messages[0].role is 'wizard'")
    other = await taken_in(local, (await upload(local, b"{oops", name="tokenizer.json", purpose="user_data"))["id"])
    assert other["status"] == "ready", "what is no data is kept as it is"


async def test_a_wrong_request_of_tus_changes_nothing(local: Platform) -> None:
    place = (await begin(local)).headers["location"]
    for headers, offset, status in (
        ({"tus-resumable": "0.2.2"}, 0, 412),
        ({"content-type": "text/plain"}, 0, 415),
        ({"upload-offset": "x"}, 0, 422),
        ({"upload-checksum": "sha256 !"}, 0, 422),
        ({}, 7, 409),
    ):
        assert (await send(local, place, offset, b"x", **headers)).status_code == status
    assert (await send(local, place, 0, DATA + b"x")).status_code == 413

    async def unsized() -> AsyncIterator[bytes]:
        yield DATA
        yield b"one too many"

    assert (await send(local, place, 0, unsized())).status_code == 413
    assert await offset_of(local, place) == 0
    assert (await local.client.delete(place, headers=TUS)).status_code == 204
    assert (await local.client.head(place, headers=TUS)).status_code == 404


async def test_an_upload_that_is_not_gone_on_with_is_dropped(local: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    await local.services.background.stop()  # its housekeeping would drop the file, too
    monkeypatch.setattr(service, "UPLOAD_SECONDS", -1.0)
    place = (await begin(local)).headers["location"]
    await send(local, place, 0, DATA[:100])
    gone = await drop_expired(local.services.database, local.services[FilePlaces])
    assert gone == [place.rpartition("/")[2]]
    assert list(local.state.uploads.iterdir()) == []


@pytest.mark.both_databases
async def test_a_ready_file_expires_when_no_live_job_reads_it_and_its_bytes_with_the_last(here: Platform) -> None:
    await here.no_more_housekeeping()  # which would drop them, too
    read, over, stays = [
        await taken_in(here, (await upload(here, name=f"{name}.jsonl", lifetimeSeconds="3600"))["id"])
        for name in ("read", "over", "stays")
    ]
    lives = epoch_seconds(read["expiresAt"]) - epoch_seconds(read["createdAt"])
    assert 3600 <= lives < 3660, "from when it is ready"
    training = document()["spec"]["training"] | {"task": "sft"}
    training["data"] = {"train": [{"source": read["id"]}], "sequenceLength": 256}
    job = await here.submit("reader", training=training)
    database, kept = here.services.database, here.services[FilePlaces]
    assert await drop_expired(database, kept) == []
    async with database.write() as session:
        for file in (read, over):
            row = await repository.get(session, file["id"])
            assert row is not None
            row.expires_at = 1.0
    assert await drop_expired(database, kept) == [over["id"]], "a live job reads the other"
    await here.finish(job["id"])
    assert await drop_expired(database, kept) == [read["id"]]
    assert [each["id"] for each in (await here.get("/files"))["items"]] == [stays["id"]]
    assert (await here.client.get(f"/api/v1/files/{stays['id']}/content")).content == DATA, "they shared their bytes"
    await here.client.delete(f"/api/v1/files/{stays['id']}")
    assert list(here.state.files.rglob("*.jsonl")) == []


async def test_a_job_names_a_file_and_its_workers_read_an_address(here: Platform) -> None:
    ready = await taken_in(here, (await upload(here))["id"])
    training = document()["spec"]["training"] | {"data": {"train": [{"source": ready["id"]}], "sequenceLength": 256}}
    training |= {"task": "sft"}
    job = await here.submit("named", training=training)
    assert job["spec"]["training"]["data"]["train"][0]["source"] == ready["id"]
    await here.handed_over(job["id"])
    carried = dump_json(LocalCluster(here.state.cluster).get(job["id"]).spec)
    key = here.state.files.resolve() / "default" / f"{ready['sha256']}.jsonl"
    assert key.as_uri() in carried
    assert ready["id"] not in carried
    refused = await here.client.delete(f"/api/v1/files/{ready['id']}")
    assert (refused.status_code, refused.json()["code"]) == (409, "file_in_use")
    assert "named" in refused.text
    await here.finish(job["id"])
    assert (await here.client.delete(f"/api/v1/files/{ready['id']}")).status_code == 204
    again = await here.client.post("/api/v1/jobs", json=document("again", training=training))
    assert again.status_code == 422
    assert "there is no file" in again.text
    assert again.json()["errors"][0]["path"] == "spec.training.data.train[0].source"


@dataclass
class Checks:
    """Stand-ins for the processes that check files, which go on until they are released."""

    under_way: list[str] = field(default_factory=list)
    broken_off: list[str] = field(default_factory=list)
    released: dict[str, asyncio.Event] = field(default_factory=dict)

    async def run(self, _module: str, _address: str, _option: str, name: str, *_: str) -> ToolEnd:
        self.under_way.append(name)
        try:
            await self.released.setdefault(name, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.broken_off.append(name)
            raise
        finally:
            self.under_way.remove(name)
        return ToolEnd(0, json.dumps({"samples": 1}).encode(), b"")

    async def are(self, *names: str) -> None:
        async def ask() -> bool:
            return sorted(self.under_way) == sorted(names)

        await until(ask, f"the checks of {names}, and there are those of {self.under_way}")

    def release(self, *names: str) -> None:
        for name in names:
            self.released.setdefault(name, asyncio.Event()).set()


async def test_a_projects_checks_do_not_keep_anothers_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two uploads of 131 KB occupied every project's checks for twenty minutes."""
    checks = Checks()
    monkeypatch.setattr(arrivals, "run_module", checks.run)
    async with platform(tmp_path / "state", auth=True) as here:
        people: People = await settle(here, tmp_path / "state")

        async def upload_to(project: str, name: str) -> str:
            asked = {"name": f"{name}.jsonl", "purpose": "fine-tune", "project": project}
            made = await people.ask(f"{project}-member", "POST", "/files", params=asked, content=name.encode())
            return str(made.json()["id"])

        for name in ("a1", "a2", "a3"):
            await upload_to("nlp", name)
        await checks.are("a1.jsonl", "a2.jsonl")
        await upload_to("cv", "b1")
        await checks.are("a1.jsonl", "b1.jsonl")
        assert checks.broken_off == ["a2.jsonl"], "the younger of the two, which is done anew"
        await upload_to("cv", "b2")
        checks.release("b1.jsonl")
        await checks.are("a1.jsonl", "b2.jsonl")
        checks.release("a1.jsonl", "b2.jsonl")
        await checks.are("a2.jsonl", "a3.jsonl")
        assert checks.broken_off == ["a2.jsonl"]


async def test_a_persons_checks_in_two_projects_do_not_keep_anothers_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Projects took turns, so that whoever had two of them could have all the checks."""
    checks = Checks()
    monkeypatch.setattr(arrivals, "run_module", checks.run)
    async with platform(tmp_path / "state", auth=True) as here:
        people: People = await settle(here, tmp_path / "state")

        async def upload_by(person: str, project: str, name: str) -> None:
            asked = {"name": f"{name}.jsonl", "purpose": "fine-tune", "project": project}
            made = await people.ask(person, "POST", "/files", params=asked, content=name.encode())
            assert made.status_code == 201, made.text

        await upload_by("admin", "nlp", "a1")
        await upload_by("admin", "cv", "a2")
        await checks.are("a1.jsonl", "a2.jsonl")
        await upload_by("cv-member", "cv", "b1")
        await checks.are("a1.jsonl", "b1.jsonl")
        await upload_by("admin", "nlp", "a3")
        await upload_by("cv-member", "cv", "b2")
        checks.release("b1.jsonl")
        await checks.are("a1.jsonl", "b2.jsonl")
        checks.release("a1.jsonl", "b2.jsonl")
        await checks.are("a2.jsonl", "a3.jsonl")
        assert checks.broken_off == ["a2.jsonl"]


async def test_the_check_of_a_file_that_is_deleted_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself, here one that would go on for ever."""
    (tmp_path / "endless.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\ntime.sleep(3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(arrivals, "CHECKER", "endless")
    async with platform(tmp_path / "state") as here:
        made = await upload(here)

        async def process() -> psutil.Process | None:
            return next((psutil.Process(int(mark.stem)) for mark in tmp_path.glob("*.pid")), None)

        checker = await until(process, "the check")
        assert checker is not None
        assert (await here.client.delete(f"/api/v1/files/{made['id']}")).status_code == 204

        async def ended() -> bool:
            return not is_alive(checker)

        await until(ended, "the end of the check")


async def test_a_file_of_another_project_is_not_there(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", auth=True) as here:
        people: People = await settle(here, tmp_path / "state")
        asked = {"name": "a.jsonl", "purpose": "fine-tune", "project": "cv"}
        made = (await people.ask("cv-member", "POST", "/files", params=asked, content=DATA)).json()

        async def ready() -> bool:
            return bool((await people.ask("cv-member", "GET", f"/files/{made['id']}")).json()["status"] == "ready")

        await until(ready, "the check")
        training = document()["spec"]["training"] | {"task": "sft"}
        training["data"] = {"train": [{"source": made["id"]}], "sequenceLength": 256}
        refused = await people.submit("nlp-member", "theirs", "nlp", training=training)
        assert refused.status_code == 422
        assert "there is no file" in refused.text
        own = await people.submit("cv-member", "ours", "cv", training=training)
        assert own.status_code == 201, own.text
        hidden = await people.ask("nlp-maintainer", "GET", f"/files/{made['id']}")
        assert hidden.json()["code"] == "file_not_found"


async def test_a_files_bytes_are_encrypted_by_its_projects_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        async with platform(tmp_path / "state", files_uri=f"s3://{BUCKET}/uploads") as here:
            limits = {"kmsKeyId": "alias/nlp"}
            for name, wanted in (("nlp", {"limits": limits}), ("cv", {})):
                assert (await here.client.put(f"/api/v1/projects/{name}", json=wanted)).status_code == 201
                made = await taken_in(here, (await upload(here, project=name))["id"])
                assert made["status"] == "ready", made
        stored = server.client().list_objects_v2(Bucket=BUCKET, Prefix="uploads/")["Contents"]
        found = {
            each["Key"].split("/")[1]: server.client().head_object(Bucket=BUCKET, Key=each["Key"]) for each in stored
        }
        assert {name: about.get("SSEKMSKeyId") for name, about in found.items()} == {"nlp": "alias/nlp", "cv": None}
