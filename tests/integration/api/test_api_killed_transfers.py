"""An API that is killed while it makes a model, or takes in a part of an upload: another goes on, nothing is torn."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import socket
import tarfile
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load
from tests.integration.api.platform import document
from tests.integration.api.test_api_process import Process, api
from tests.integration.checkpoint.one_rank import identity, outcomes, state
from tests.polling import eventually

from muster.recipe.architecture import Architecture
from muster.trainer.checkpoint import CheckpointSaver
from muster.trainer.models.decoder import Decoder, build
from muster.words.base import dump
from muster.words.job import Keep
from muster.words.state_folder import StateFolder

pytestmark = pytest.mark.long
STEPS = (5, 6, 7)


def committed(folder: Path) -> Decoder:
    """A model of some 20 MB, as a job commits it at each of the steps."""
    shape = Architecture(
        dim=256, layers=4, heads=4, kv_heads=4, ffn_dim=1_024, vocab_size=4_096, max_positions=64, rope_theta=10_000.0,
        norm_eps=1e-6, tied_head=True,
    )  # fmt: skip
    model = build(shape).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    about = identity(folder.as_uri())
    saver = CheckpointSaver(type(about)(**{**about.__dict__, "architecture": dump(model.architecture)}), Keep(), {})
    try:
        for step in STEPS:
            saver.save(state(model, torch.optim.AdamW(model.parameters()), step))
            assert outcomes(saver) == [(step, True, None)]
    finally:
        saver.close()
    return model


def test_a_model_that_was_being_made_when_its_api_was_killed_is_made_by_the_next(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    with api(folder.root) as process:
        uid = httpx2.post(f"{process.url}/api/v1/jobs", json=document(), timeout=60).json()["id"]
    model = committed(folder.checkpoints / uid)
    made = folder.exports / uid

    def writes(step: int, pattern: str) -> bool:
        """Whether its tool has come so far; a quick one may have ended between two looks."""
        return any(made.glob(f"step-{step}-*{pattern}")) or any(made.glob(f"step-{step}-*/config.json"))

    moments = {  # a step of its own for each: the tool of a killed API goes on, and may come to the model's end
        5: lambda: True,  # its tool has been started
        6: lambda: writes(6, ".unfinished-*"),
        7: lambda: writes(7, ".unfinished-*/*.safetensors*"),
    }
    for step, moment in moments.items():
        with api(folder.root) as process:
            begin(f"{process.url}/api/v1/jobs/{uid}/checkpoints/{step}:export")
            eventually(moment, "the moment to kill it")
            assert process.end(signal.SIGKILL) == -signal.SIGKILL
    with api(folder.root) as process:
        for step in STEPS:
            url = f"{process.url}/api/v1/jobs/{uid}/checkpoints/{step}:export"
            archive = eventually(lambda url=url: fetched(url), "the model")
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                files = {each.name.partition("/")[2]: tar.extractfile(each) for each in tar if each.isfile()}
                weights = load(files["model.safetensors"].read())  # type: ignore[union-attr]
            embedding = weights["model.embed_tokens.weight"]
            assert torch.equal(embedding, model.state_dict()[next(n for n in model.state_dict() if "embed" in n)])
        eventually(lambda: not any(made.glob("*.unfinished-*")), "the end of what the killed ones had begun")


def begin(url: str) -> None:
    """Ask for the model and hang up: the answer would come when it is made."""
    try:
        reply = httpx2.get(url, timeout=httpx2.Timeout(30, read=0.2))
    except httpx2.ReadTimeout:
        return
    pytest.fail(f"answered at once: {reply.status_code} {reply.text[:2_000]}")


def fetched(url: str) -> bytes | None:
    reply = httpx2.get(url, timeout=60)
    assert reply.status_code in (200, 202), reply.text
    return reply.content if reply.status_code == 200 else None


def test_a_part_that_was_arriving_when_its_api_was_killed_is_sent_again_and_counts_once(tmp_path: Path) -> None:
    data = os.urandom(12_000_000)
    halves = data[:3_000_000], data[3_000_000:]
    with api(tmp_path / "state") as process:
        about = {"filename": "a.bin", "purpose": "user_data", "mime_type": "application/octet-stream"}
        begun = asked(process, "", json={**about, "bytes": len(data)})
        first = asked(process, f"/{begun['id']}/parts", files={"data": ("part", halves[0])})
        with cut_part(process, f"/v1/uploads/{begun['id']}/parts", halves[1], tmp_path / "state"):
            assert process.end(signal.SIGKILL) == -signal.SIGKILL
    with api(tmp_path / "state") as process:
        second = asked(process, f"/{begun['id']}/parts", files={"data": ("part", halves[1])})
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        parts = [first["id"], second["id"]]
        whole = asked(process, f"/{begun['id']}/complete", json={"part_ids": parts, "md5": digest})
        file_id = whole["file"]["id"]

        def content() -> bytes:
            reply = httpx2.get(f"{process.url}/v1/files/{file_id}/content", timeout=60)
            return reply.content if reply.status_code == 200 else b""

        assert eventually(content, "the file") == data
        left = StateFolder(tmp_path / "state").uploads
        assert [path.name for path in left.iterdir()] == [], "what the killed one had taken in stays on the disk"


def asked(process: Process, path: str, **request: Any) -> dict[str, Any]:
    reply = httpx2.post(f"{process.url}/v1/uploads{path}", timeout=60, **request)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def cut_part(process: Process, path: str, data: bytes, folder: Path) -> socket.socket:
    """The connection over which most of a part has been sent, of which some lies on the disk."""
    uploads = StateFolder(folder).uploads
    before = set(uploads.iterdir())
    host, _, port = process.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data) + 10_000}\r\n"
        "Content-Type: multipart/form-data; boundary=cut\r\n\r\n"
        '--cut\r\nContent-Disposition: form-data; name="data"; filename="part"\r\n\r\n'
    )
    connection.sendall(head.encode() + data[:-1_000])

    def arrives() -> bool:
        return any(new.stat().st_size for new in set(uploads.iterdir()) - before)

    eventually(arrives, "a part that is arriving")
    return connection
