"""What a body says means the same as in a file, and no body keeps others waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, platform

JSON, YAML = {"content-type": "application/json"}, {"content-type": "application/yaml"}


@pytest.fixture
async def local(tmp_path: Path) -> Any:
    async with platform(tmp_path / "state") as here:
        yield here


def with_optimizer(**optimizer: Any) -> dict[str, Any]:
    wanted = document()
    wanted["spec"]["training"]["optimizer"] = optimizer
    return wanted


async def test_numbers_are_those_of_yaml_1_2(local: Platform) -> None:
    text = json.dumps(with_optimizer(lr="HERE"), indent=1).replace('"HERE"', "1e-4")
    reply = await local.client.post("/api/v1/jobs", content=text.encode(), headers=YAML)
    assert reply.status_code == 201, reply.text
    assert reply.json()["spec"]["training"]["optimizer"]["lr"] == 1e-4


@pytest.mark.parametrize("headers", [JSON, YAML])
async def test_a_key_that_stands_twice_is_refused_with_its_place(local: Platform, headers: dict[str, str]) -> None:
    body = b'{"metadata": {"name": "a"},\n "spec": {"suspend": true,\n "suspend": false}}'
    reply = await local.client.post("/api/v1/jobs", content=body, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_document")
    (fault,) = reply.json()["errors"]
    assert (fault["line"], fault["column"]) == (3, 2)
    assert fault["message"].startswith("the key 'suspend' stands here and in line 2")


@pytest.mark.parametrize("headers", [JSON, YAML])
async def test_a_fault_is_named_with_its_place(local: Platform, headers: dict[str, str]) -> None:
    body = json.dumps(with_optimizer(learningRate=1), indent=2).encode()
    reply = await local.client.post("/api/v1/jobs", content=body, headers=headers)
    (fault,) = reply.json()["errors"]
    line = next(n for n, text in enumerate(body.decode().splitlines(), 1) if "learningRate" in text)
    assert fault == {
        "path": "spec.training.optimizer.learningRate",
        "message": "unknown key",
        "didYouMean": "lr",  # Hugging Face's name for it
        "line": line,
        "column": body.decode().splitlines()[line - 1].index('"') + 1,
    }


MANY = 6_000
COSTLY: dict[str, tuple[dict[str, Any], str]] = {
    "numbers as values of variables": (
        document(runtime={"env": [{"name": f"A{n}", "value": n} for n in range(MANY)]}),
        f"{MANY - 1:,} more",
    ),
    "unknown keys": (document(**{f"training{n}": 1 for n in range(MANY)}), f"{MANY - 1:,} more"),
    "unknown keys at the top": (document() | {f"spec{n}": 1 for n in range(MANY)}, f"{MANY - 1:,} more"),
}


@pytest.mark.parametrize("name", COSTLY)
async def test_at_most_a_hundred_faults_are_told(local: Platform, name: str) -> None:
    body, detail = COSTLY[name]
    reply = await local.client.post("/api/v1/jobs", json=body)
    assert (reply.status_code, len(reply.json()["errors"])) == (422, 100)
    assert detail in reply.json()["detail"]
