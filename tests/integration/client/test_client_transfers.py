"""Files go to and from a real server: whole, also after a cut, and never when they changed on the way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.api.platform import Platform, served
from tests.integration.client.speaking import Speaker
from tests.polling import eventually

from muster.client import AsyncMuster, Muster, NotFound
from muster.client.address import Server
from muster.client.connection import Connection
from muster.client.errors import InvalidRequest, MusterError
from muster.client.source_folder import pack
from muster.client.transfers import FileTransfers, inside

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
DATA = b"".join(json.dumps({**CHAT, "id": number}).encode() + b"\n" for number in range(40_000))  # 4 MB


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with served(tmp_path / "state") as (running, _):
        yield running


def connected(here: Platform) -> Connection:
    return Connection(Server(str(here.client.base_url).rstrip("/"), "a test"))


async def test_a_file_arrives_is_gone_on_with_and_comes_back(
    here: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_path / "chat.jsonl", tmp_path / "back.jsonl"
    path.write_bytes(DATA)
    seen: list[int] = []

    def killed(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    def transfer() -> dict[str, object]:
        with connected(here) as connection:
            with pytest.raises(KeyboardInterrupt), FileTransfers(connection) as first:
                first.upload(path, "fine-tune", progress=killed)
            # The server hears of a broken connection later than the client that broke it.
            eventually(lambda: connection.get("files")["items"][0]["received"], "what arrived of the file")
            with FileTransfers(connection) as second:
                made = second.upload(path, "fine-tune", progress=lambda done, _: seen.append(done))
                found = second.until_checked(str(made["id"]))
                part = target.with_name("back.jsonl.part")
                part.write_bytes(DATA[:1_000])  # as an earlier process left it
                second.download(f"files/{made['id']}/content", target, len(DATA))
            assert len(connection.get("files")["items"]) == 1, "it was gone on with, not begun anew"
            return found

    found = await asyncio.to_thread(transfer)
    assert (found["status"], found["samples"]) == ("ready", 40_000)
    assert found["sha256"] == hashlib.sha256(DATA).hexdigest()
    assert seen[0] > 0, "what had arrived was not sent again"
    assert target.read_bytes() == DATA


async def test_a_source_folder_is_uploaded_once_by_its_content(here: Platform, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)")

    def transfer() -> tuple[list[str], list[dict[str, object]]]:
        with connected(here) as connection, FileTransfers(connection) as sender:
            ids = [sender.upload_source(pack(folder, tmp_path)) for _ in range(2)]
            (folder / "train.py").write_text("print(2)")
            ids.append(sender.upload_source(pack(folder, tmp_path)))
            forged = tmp_path / "forged"
            forged.write_text("another content under the name of the next one")
            (folder / "train.py").write_text("print(3)")
            archive = pack(folder, tmp_path)
            sender.until_checked(sender.upload(forged, "source", name=archive.name)["id"])
            ids.append(sender.upload_source(archive))
            return ids, connection.get("files", purpose="source")["items"]

    ids, files = await asyncio.to_thread(transfer)
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert [file["name"] for file in files if file["id"] == ids[3]] == [files[0]["name"]]
    assert len(files) == 4, "the forged file was not taken for the folder"


async def test_both_clients_upload_the_folder_of_a_program(here: Platform, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)")
    (tmp_path / "job.yaml").write_text("spec: {program: {command: [train.py], source: project}}")
    url = str(here.client.base_url).rstrip("/")

    def submit() -> str:
        with Muster(url) as muster:
            assert muster.jobs.plan(tmp_path / "job.yaml", name="first").accepted
            assert list(muster.files.list()) == []
            return str(muster.jobs.submit(tmp_path / "job.yaml", name="first").document["spec"]["program"]["source"])

    first = await asyncio.to_thread(submit)
    async with AsyncMuster(url) as muster:
        document = {"spec": {"program": {"command": ["train.py"], "source": str(folder)}}}
        second = (await muster.jobs.submit(document, name="second")).document["spec"]["program"]["source"]
        assert [file.id async for file in muster.files.list()] == [first] == [second]


async def test_a_file_that_changes_while_it_is_sent_is_refused(here: Platform, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(DATA)

    def writes(done: int, total: int) -> None:
        if done == total:
            with path.open("r+b") as file:
                file.write(b"{")

    def transfer() -> None:
        with connected(here) as connection, FileTransfers(connection) as sender:
            with pytest.raises(InvalidRequest, match="changed while it was sent"):
                sender.upload(path, "fine-tune", progress=writes)
            assert connection.get("files")["items"] == []
            for name, data in (("none.jsonl", None), ("empty.jsonl", b"")):
                if data is not None:
                    (tmp_path / name).write_bytes(data)
                with pytest.raises(InvalidRequest, match=name):
                    sender.upload(tmp_path / name, "fine-tune")

    await asyncio.to_thread(transfer)


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
async def test_programs_upload_list_fetch_and_delete(here: Platform, tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "chat.jsonl", tmp_path / "back.jsonl"
    path.write_bytes(DATA[:100_000].rpartition(b"\n")[0] + b"\n")
    said: list[int] = []
    speaker = Speaker.to(str(here.client.base_url), kind)
    files = speaker.client.files
    made = await speaker.do(files.upload, path, progress=lambda done, _: said.append(done))
    assert (made.name, made.purpose, made.status, made.bytes) == (
        "chat.jsonl",
        "fine-tune",
        "ready",
        path.stat().st_size,
    )
    assert said[-1] == made.bytes
    assert await speaker.do(files.get, made.id) == made
    assert await speaker.all(files.list, name="chat.jsonl", limit=5) == [made]
    assert await speaker.do(files.download, made.id, target) == target
    assert target.read_bytes() == path.read_bytes()
    await speaker.do(files.delete, made.id)
    assert await speaker.all(files.list) == []
    with pytest.raises(NotFound):
        await speaker.do(files.get, made.id)
    path.write_bytes(DATA[:1_000])  # ends within a line
    with pytest.raises(InvalidRequest, match=r"nothing can be learnt from it: chat\.jsonl, line"):
        await speaker.do(files.upload, path)


async def test_an_upload_that_is_cancelled_is_gone_on_with(here: Platform, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(DATA)
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told(done: int, total: int) -> None:
        if done > total // 3:
            loop.call_soon_threadsafe(began.set)
            time.sleep(0.02)  # not a wait: the pace of a slow line

    async with AsyncMuster(str(here.client.base_url)) as client:
        sending = asyncio.create_task(client.files.upload(path, progress=told))
        await began.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        made = await client.files.upload(path)
        assert made.sha256 == hashlib.sha256(DATA).hexdigest()
        assert [file.id async for file in client.files.list()] == [made.id]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "", ".", "a\n", "~/../../x"])
def test_a_name_that_a_server_says_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(MusterError, match="outside"):
        inside(tmp_path, name)
    assert inside(tmp_path, "adapter/config.json") == tmp_path / "adapter/config.json"


async def test_a_download_is_written_through_no_link(here: Platform, tmp_path: Path) -> None:
    path, target, elsewhere = tmp_path / "chat.jsonl", tmp_path / "back.jsonl", tmp_path / "elsewhere"
    path.write_bytes(DATA[:10_000])
    target.with_name("back.jsonl.part").symlink_to(elsewhere)

    def transfer() -> None:
        with connected(here) as connection, FileTransfers(connection) as transfers:
            made = transfers.upload(path, "user_data")
            with pytest.raises(InvalidRequest, match="no regular file"):
                transfers.download(f"files/{made['id']}/content", target, 10_000)

    await asyncio.to_thread(transfer)
    assert not elsewhere.exists()


def test_an_export_goes_into_no_linked_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a folder that somebody put where an earlier try would have left one, nor by the server's words."""
    elsewhere, target = tmp_path / "elsewhere", tmp_path / "model"
    elsewhere.mkdir()
    connection = Connection(Server("http://127.0.0.1:9", "a test"))
    said = {"state": "ready", "total": 1, "files": [{"path": "../../escaped", "bytes": 1}]}
    monkeypatch.setattr(connection, "get", lambda *_, **__: said)
    with FileTransfers(connection) as transfers:
        with pytest.raises(MusterError, match="outside"):
            transfers.export("0123456789", 7, target)
        (tmp_path / "model.unfinished.01234567.7").symlink_to(elsewhere, target_is_directory=True)
        with pytest.raises(InvalidRequest, match="is a link"):
            transfers.export("0123456789", 7, target)
    assert list(elsewhere.iterdir()) == []
