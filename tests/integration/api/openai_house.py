"""What the tests of /v1 stand on: mapped models, training files, and OpenAI's own client over the app."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml
from openai.types.fine_tuning import FineTuningJob
from tests.integration.api.platform import BASE, Platform, platform
from tests.polling import WAIT_SECONDS_MAX

TRAINING = {
    "model": {"preset": "muster-1m"},
    "data": {"sequenceLength": 256},
    "optimizer": {"lr": 0.02},
    "batch": {"microBatch": 2},
}
MODELS: dict[str, Any] = {
    "models": {
        "tiny": {"spec": {"training": TRAINING, "gang": {"nodes": 2}}},
        "org/whole": {
            "spec": {"training": {**TRAINING, "model": {"source": "file:///models/whole"}}},
            "ownedBy": "org",
        },
    }
}


def models_file(folder: Path, models: Any = None) -> Path:
    path = folder / "base-models.yaml"
    path.write_text(yaml.safe_dump(MODELS if models is None else models, sort_keys=False))
    return path


def chat_file(folder: Path, examples: int = 60, name: str = "chat.jsonl") -> str:
    """The address of a file of conversations."""
    turns = [
        {"role": "user", "content": "What is a gang?"},
        {"role": "assistant", "content": "Workers that run together."},
    ]
    path = folder / name
    path.write_text(f"{json.dumps({'messages': turns})}\n" * examples)
    return path.as_uri()


def preference_file(folder: Path, examples: int = 60) -> str:
    """The address of a file of pairs, as OpenAI's guide has them."""
    pair = {
        "input": {"messages": [{"role": "user", "content": "What is a gang?"}]},
        "preferred_output": [{"role": "assistant", "content": "Workers that run together."}],
        "non_preferred_output": [{"role": "assistant", "content": "No idea."}],
    }
    path = folder / "pairs.jsonl"
    path.write_text(f"{json.dumps(pair)}\n" * examples)
    return path.as_uri()


class Cutting(httpx2.AsyncBaseTransport):
    """Carries every request to the app, and loses the replies to POSTs where `lose` says so."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner
        self.lose = 0
        self.retries: list[str | None] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        reply = await self._inner.handle_async_request(request)
        if request.method == "POST":
            self.retries.append(request.headers.get("x-stainless-retry-count"))
            if self.lose:
                self.lose -= 1
                await reply.aread()
                raise httpx2.ReadError("the connection was cut", request=request)
        return reply


@contextlib.asynccontextmanager
async def openai_client(here: Platform, token: str = "unused", **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, whose requests reach the app without a socket; `client.cutting` loses replies."""
    cutting = Cutting(httpx2.ASGITransport(app=here.app))
    async with (
        httpx2.AsyncClient(transport=cutting, base_url=f"{BASE}/v1", timeout=WAIT_SECONDS_MAX) as http,
        openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key=token, http_client=http, **options) as client,
    ):
        client.cutting = cutting  # type: ignore[attr-defined]
        yield client


@contextlib.asynccontextmanager
async def openai_platform(folder: Path, **options: Any) -> AsyncIterator[tuple[Platform, openai.AsyncOpenAI]]:
    async with (
        platform(folder / "state", base_models_file=models_file(folder), **options) as here,
        openai_client(here) as client,
    ):
        yield here, client


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's client waits half a second before a retry."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.001)


def uid_of(job: FineTuningJob) -> str:
    return job.id.removeprefix("ftjob-")
