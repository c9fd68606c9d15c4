"""Models are made of commits by the API and fetched: as an archive or file by file, whole or from where it broke."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.integration.api.platform import Platform, platform
from tests.s3_servers import BUCKET, moto_server

from muster.api.data.exports import making
from muster.api.data.exports.making import ModelExports

FILES = {"config.json": b"{}", "model.safetensors": os.urandom(3_000_000), "base/tokenizer.json": b"[1, 2]" * 99}


@pytest.fixture
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Platform, str]]:
    """A platform without a trainer, and the address of a model that was made before: of step 20."""
    monkeypatch.setattr("muster.api.data.exports.routes.available", lambda: False)
    async with platform(tmp_path / "state") as here:
        uid = (await here.submit("base"))["id"]
        here.commit(uid, 20)
        folder = here.state.exports / uid / "step-20-transformers-keep"
        for name, data in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        yield here, f"/api/v1/jobs/{uid}/checkpoints/20:export"


def unpacked(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {each.name.partition("/")[2]: archive.extractfile(each).read() for each in members}  # type: ignore[union-attr]


async def test_a_model_is_fetched_as_an_archive_or_file_by_file_from_any_byte_on(made: tuple[Platform, str]) -> None:
    here, url = made
    whole = await here.client.get(url)
    assert (whole.status_code, whole.headers["content-type"]) == (200, "application/x-tar")
    assert unpacked(whole.content) == FILES
    told = (await here.client.get(url, headers={"accept": "application/json"})).json()
    assert (told["state"], told["bytes"]) == ("ready", len(whole.content))
    assert {file["path"]: file["bytes"] for file in told["files"]} == {name: len(data) for name, data in FILES.items()}
    for start in (0, 1, 511, 512, 1_000_000, len(whole.content) - 1):
        rest = await here.client.get(url, headers={"range": f"bytes={start}-", "if-range": whole.headers["etag"]})
        assert (rest.status_code, rest.content) == (206, whole.content[start:])
    older = await here.client.get(url, headers={"range": "bytes=5-", "if-range": '"another"'})
    assert (older.status_code, older.content) == (200, whole.content), "a part of something else is of no use"
    for name, data in FILES.items():
        reply = await here.client.get(url, params={"file": name}, headers={"range": "bytes=1-"})
        assert reply.content == data[1:]
    for name in ("../../../admin-token", "config", "/etc/passwd"):
        assert (await here.client.get(url, params={"file": name})).json()["code"] == "export_file_not_found"


async def test_what_can_not_be_made_or_written_is_refused(made: tuple[Platform, str]) -> None:
    here, url = made

    async def code(method: str, at: str, **more: Any) -> tuple[int, str]:
        reply: httpx2.Response = await here.client.request(method, at, **more)
        return reply.status_code, reply.json()["code"]

    assert await code("GET", f"{url}?dtype=bf16") == (424, "export_unavailable")
    assert await code("GET", f"{url}?format=gguf") == (422, "invalid_parameter")
    for to in ("file:///tmp/x", "s3://bucket", "nonsense://x"):
        assert await code("POST", url, json={"to": to}) == (422, "invalid_parameter")
    assert await code("POST", url, json={"where": "s3://b/x"}) == (422, "invalid_parameter")
    assert (await here.client.post(url)).json()["state"] == "ready"


async def test_a_model_is_written_to_s3_once_below_the_projects_prefix(
    made: tuple[Platform, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, url = made
    to = f"s3://{BUCKET}/models/base"
    with moto_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        for limits, status in (({"checkpointPrefix": f"s3://{BUCKET}/others"}, 422), ({}, 200)):
            assert (await here.client.put("/api/v1/projects/default", json={"limits": limits})).status_code == 200
            reply = await here.client.post(url, json={"to": to})
            assert reply.status_code == status, reply.text
        assert (reply.json()["state"], reply.json()["to"]) == ("sent", to)
        client = server.client()

        def stored() -> dict[str, bytes]:
            found = client.list_objects_v2(Bucket=BUCKET)["Contents"]
            return {each["Key"]: client.get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read() for each in found}

        assert stored() == {f"models/base/{name}": data for name, data in FILES.items()}
        client.delete_object(Bucket=BUCKET, Key="models/base/config.json")
        assert (await here.client.post(url, json={"to": to})).json()["state"] == "sent"
        assert len(stored()) == len(FILES) - 1, "what was written there is not written again"
    acts = [act["action"] for act in (await here.get("/audit"))["items"]]
    assert acts.count("checkpoint.exported") == 1


async def test_a_model_that_nobody_reads_any_more_is_removed(made: tuple[Platform, str]) -> None:
    here, url = made
    exports = here.services[ModelExports]
    exports.drop_old()
    assert (await here.client.get(url)).status_code == 200
    (folder,) = [path for path in here.state.exports.rglob("step-*") if path.is_dir()]
    os.utime(folder, (time.time() - making.KEPT_SECONDS - 1,) * 2)
    exports.drop_old()
    assert not list(here.state.exports.rglob("*.json"))
