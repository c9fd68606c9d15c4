"""What lies in a job's folder is asked for in threads of its own: storage that hangs holds up its readers alone."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.api.platform import Platform
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.s3_servers import silent_server

from muster.api.core import folder_threads
from muster.api.core.folder_threads import PER_FOLDER, FolderThreads, StorageSilent
from muster.words.address import parse_address

FOLDER, OTHER = parse_address("file:///commits/one"), parse_address("file:///commits/two")


async def test_storage_of_one_job_that_answers_nobody_holds_up_no_other(
    here: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_threads, "SECONDS_MAX", 0.3)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(6))  # as many as two cores are given
    with silent_server() as url:
        for name, value in {"MUSTER_S3_ENDPOINT": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
            monkeypatch.setenv(name, value)
        silent = (await here.submit("silent", checkpoint={"uri": "s3://commits/here"}))["id"]
        other = (await here.submit("other"))["id"]
        asked = [
            f"/api/v1/jobs/{silent}/{what}" for what in ("checkpoints", "checkpoints/last", "data", "profiles") * 4
        ]
        answers = await asyncio.gather(*map(here.client.get, asked))
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), WAIT_SECONDS_MAX) == "free"
        monkeypatch.setattr(folder_threads, "SECONDS_MAX", WAIT_SECONDS_MAX)  # the other's answer may take its time
        told = (await here.client.get(f"/api/v1/jobs/{other}/checkpoints")).json()
        assert (told["items"], told["reason"]) == ([], None)
    for path, answer in zip(asked, answers, strict=True):
        wanted = (200, "reason") if path.endswith("checkpoints") else (503, "detail")
        assert (answer.status_code, "did not answer within 0.3 s" in answer.json()[wanted[1]]) == (wanted[0], True), (
            path
        )


async def test_a_folder_takes_a_few_threads_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_threads, "SECONDS_MAX", 0.1)
    threads, hang, begun = FolderThreads(), threading.Event(), []

    def work() -> str:
        begun.append(1)
        hang.wait()
        return "done"

    waited = await asyncio.gather(*(threads.run(FOLDER, work) for _ in range(9)), return_exceptions=True)
    assert {type(each) for each in waited} == {StorageSilent}
    await asyncio.to_thread(eventually, lambda: len(begun) == PER_FOLDER, "its threads to begin")
    monkeypatch.setattr(folder_threads, "SECONDS_MAX", WAIT_SECONDS_MAX)
    assert await threads.run(OTHER, lambda: "another folder") == "another folder"
    monkeypatch.setattr(folder_threads, "SECONDS_MAX", 0.1)
    with pytest.raises(StorageSilent, match=r"file:///commits/one: its storage did not answer within 0\.1 s"):
        await threads.run(FOLDER, lambda: "no thread is left")
    assert len(begun) == PER_FOLDER
    hang.set()
    monkeypatch.setattr(folder_threads, "SECONDS_MAX", WAIT_SECONDS_MAX)
    assert await threads.run(FOLDER, lambda: "free again") == "free again"
    with pytest.raises(ZeroDivisionError):
        await threads.run(FOLDER, lambda: 1 / 0)
    await asyncio.to_thread(eventually, lambda: not _named("folder"), "the threads to end")


def _named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]
