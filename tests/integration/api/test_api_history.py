"""Metrics, logs, checkpoints and why: what is left of a job's lives."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, until
from tests.s3_servers import moto_server

from muster.words.base import dump_json
from muster.words.signals import Cause, StepRecord
from muster.words.status import Failure, Phase
from muster.words.times import rfc3339


def record(attempt: int, step: int, loss: float, **more: Any) -> str:
    made = StepRecord(
        attempt=attempt,
        step=step,
        at=100.0 + step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        tokens=10,
        tokens_per_second=5.0,
        step_seconds=0.1,
        data_wait_seconds=0.0,
        memory_bytes=1,
        **more,
    )
    return dump_json(made)


def worker_dir(here: Platform, uid: str, attempt: int, worker: int = 0) -> Path:
    folder = here.state.worker(uid, attempt, worker)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def test_a_later_attempt_overrides_the_steps_that_it_trained_again(here: Platform) -> None:
    uid = (await here.submit())["id"]
    first = worker_dir(here, uid, 1) / "steps.jsonl"
    lines = [record(1, 0, 5.0, evaluation_loss=5.0)] + [record(1, step, 5.0 - step / 10) for step in range(1, 11)]
    first.write_text("\n".join(lines) + '\n{"half a line')
    assert [p["step"] for p in (await here.get(f"/jobs/{uid}/metrics"))["points"]] == list(range(1, 11))
    second = worker_dir(here, uid, 2) / "steps.jsonl"
    second.write_text(
        "\n".join(record(2, step, 1.0, evaluation_loss=1.5 if step == 8 else None) for step in (7, 8)) + "\n"
    )
    history = await here.get(f"/jobs/{uid}/metrics")
    assert [(p["step"], p["attempt"]) for p in history["points"]] == [(s, 1) for s in range(1, 7)] + [(7, 2), (8, 2)]
    assert history["evaluations"] == [
        {"step": 0, "attempt": 1, "at": rfc3339(100.0), "loss": 5.0, "values": {}},
        {"step": 8, "attempt": 2, "at": rfc3339(108.0), "loss": 1.5, "values": {}},
    ]
    assert (history["total"], history["downsampled"]) == (8, False)
    with second.open("a") as file:
        file.write(record(2, 9, 0.9) + "\n")
    more = await here.get(f"/jobs/{uid}/metrics", afterStep=8)
    assert [(p["step"], p["loss"]) for p in more["points"]] == [(9, 0.9)]


async def test_a_long_history_is_thinned_and_keeps_its_ends(here: Platform) -> None:
    uid = (await here.submit())["id"]
    lines = [record(1, step, 2.0) for step in range(1, 5001)]
    (worker_dir(here, uid, 1) / "steps.jsonl").write_text("\n".join(lines) + "\n")
    history = await here.get(f"/jobs/{uid}/metrics", points=100)
    steps = [point["step"] for point in history["points"]]
    assert (len(steps), steps[0], steps[-1], history["total"], history["downsampled"]) == (100, 1, 5000, 5000, True)
    assert steps == sorted(set(steps))
    assert [p["step"] for p in (await here.get(f"/jobs/{uid}/metrics", points=1))["points"]] == [5000]


async def test_a_loss_that_is_not_a_number_is_null(here: Platform) -> None:
    uid = (await here.submit())["id"]
    entry = json.loads(record(1, 1, 1.0)) | {"loss": math.nan}
    (worker_dir(here, uid, 1) / "steps.jsonl").write_text(json.dumps(entry) + "\n")
    assert (await here.get(f"/jobs/{uid}/metrics"))["points"][0]["loss"] is None


async def test_logs_by_page_tail_and_offset(here: Platform) -> None:
    uid = (await here.submit())["id"]
    empty = await here.get(f"/jobs/{uid}/logs")
    assert (empty["attempt"], empty["text"], empty["complete"]) == (None, "", False)
    (worker_dir(here, uid, 1) / "log").write_text("".join(f"line {n}\n" for n in range(100)))
    (worker_dir(here, uid, 1, 1) / "log").write_text("of worker 1\n")
    (worker_dir(here, uid, 2) / "log").write_text("größer\nlast without its end")
    page = await here.get(f"/jobs/{uid}/logs")
    assert (page["attempt"], page["attempts"], page["workers"]) == (2, [1, 2], [0])
    assert page["text"] == "größer\nlast without its end"
    tail = await here.get(f"/jobs/{uid}/logs", attempt=1, tail=2)
    assert (tail["text"], tail["complete"]) == ("line 98\nline 99\n", True)
    assert (await here.get(f"/jobs/{uid}/logs", attempt=1, offset=tail["offset"]))["text"] == tail["text"]
    assert (await here.get(f"/jobs/{uid}/logs", attempt=1, offset=tail["nextOffset"]))["text"] == ""
    assert (await here.get(f"/jobs/{uid}/logs", attempt=1, worker=1))["text"] == "of worker 1\n"
    plain = await here.client.get(
        f"/api/v1/jobs/{uid}/logs", params={"attempt": 1, "tail": 1}, headers={"accept": "text/plain"}
    )
    assert (plain.text, plain.headers["content-type"]) == ("line 99\n", "text/plain; charset=utf-8")
    for wrong in ({"attempt": 9}, {"attempt": 1, "worker": 7}):
        reply = await here.client.get(f"/api/v1/jobs/{uid}/logs", params=wrong)
        assert (reply.status_code, reply.json()["code"]) == (404, "log_not_found")


async def test_a_large_log_comes_in_pages_that_join(here: Platform) -> None:
    uid = (await here.submit())["id"]
    whole = "".join(f"{n:06d} ärger\n" for n in range(120_000))
    (worker_dir(here, uid, 1) / "log").write_text(whole)
    read, offset = "", 0
    while True:
        page = await here.get(f"/jobs/{uid}/logs", offset=offset)
        if page["nextOffset"] == offset:
            break
        assert len(page["text"].encode()) <= 1_000_000
        read, offset = read + page["text"], page["nextOffset"]
    assert read == whole


async def test_checkpoints_are_what_the_folder_holds(here: Platform) -> None:
    uid = (await here.submit())["id"]
    assert (await here.get(f"/jobs/{uid}/checkpoints"))["items"] == []
    here.commit(uid, 20, metrics={"loss": 3.0})
    here.commit(uid, 40, attempt=2, best=True, metrics={"loss": 2.0, "evaluation_loss": 2.5}, tokens=99)
    (here.state.checkpoints / uid / "commits" / "step-00000060.json").write_text('{"torn')
    (here.state.checkpoints / uid / "commits" / "step-00000070.json").write_text("[" * 200_000)
    os.mkfifo(here.state.checkpoints / uid / "commits" / "step-00000080.json")
    (here.state.checkpoints / uid / "commits" / "step-00000060.json.tmp").write_text("")
    found = await here.get(f"/jobs/{uid}/checkpoints")
    assert [item["step"] for item in found["items"]] == [20, 40]
    folder = f"file://{here.state.checkpoints.resolve()}/{uid}"
    assert found["items"][1] == {
        "step": 40,
        "attempt": 2,
        "committedAt": rfc3339(1040.0),
        "worldSize": 2,
        "tokens": 99,
        "metrics": {"loss": 2.0, "evaluation_loss": 2.5},
        "best": True,
        "bytes": 30,
        "kind": "tensors",
        "addedBytes": 0,  # its files lie in no folder of its own
        "files": 2,
        "pinned": False,
        "evaluations": [],
        "uri": f"{folder}/commits/step-00000040.json",
    }
    assert (found["uri"], found["reason"]) == (folder, None)
    elsewhere = (await here.submit("s3", checkpoint={"uri": "s3://bucket/x"}))["id"]
    answer = await here.get(f"/jobs/{elsewhere}/checkpoints")
    assert (answer["items"], answer["uri"]) == ([], f"s3://bucket/x/{elsewhere}")
    assert "s3://" in answer["reason"]


async def test_checkpoints_in_s3_are_listed_and_begun_from(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API looked into folders only, although the operator and the trainer read S3."""
    with moto_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        uid = (await here.submit("s3", checkpoint={"uri": f"s3://{server.bucket}/a b#?/%41"}))["id"]
        folder = f"s3://{server.bucket}/a b#?/%41/{uid}"
        assert await here.get(f"/jobs/{uid}/checkpoints") == {"uri": folder, "items": [], "reason": None}
        path = here.commit(uid, 20, metrics={"loss": 3.0})
        server.client().upload_file(str(path), server.bucket, f"a b#?/%41/{uid}/commits/{path.name}")
        found = await here.get(f"/jobs/{uid}/checkpoints")
        assert [(item["step"], item["uri"]) for item in found["items"]] == [(20, f"{folder}/commits/{path.name}")]
        wanted = document("tuned")
        wanted["spec"]["training"]["model"] = {"from": {"job": "s3", "step": 20}}
        made = await here.client.post("/api/v1/jobs", json=wanted)
        assert made.json()["spec"]["training"]["model"]["from"]["uri"] == folder


@pytest.mark.parametrize(
    ("part", "value", "path"),
    [
        ("checkpoint", {"uri": "s3://"}, "spec.checkpoint.uri"),
        ("checkpoint", {"uri": "https://host/x"}, "spec.checkpoint.uri"),
        ("checkpoint", {"uri": "file://data/x"}, "spec.checkpoint.uri"),
        ("source", "http://host/x.txt", "spec.training.data.train[0].source"),
        ("source", "hf://datasets/a/b", "spec.training.data.train[0].source"),
        ("from", {"uri": "s3://"}, "spec.training.model.from.uri"),
    ],
)
async def test_an_address_that_nobody_reads_is_refused(here: Platform, part: str, value: Any, path: str) -> None:
    wanted = document("bad")
    if part == "checkpoint":
        wanted["spec"]["checkpoint"] = value
    elif part == "source":
        wanted["spec"]["training"]["data"]["train"][0]["source"] = value
    else:
        wanted["spec"]["training"]["model"] = {"from": value}
    answer = await here.client.post("/api/v1/jobs?dryRun=true", json=wanted)
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)


@pytest.mark.both_databases
async def test_why_names_the_place_in_the_queue(here: Platform) -> None:
    uids = {
        name: (await here.submit(name, **more))["id"] for name, more in (("a", {}), ("b", {}), ("c", {"priority": 5}))
    }
    for uid in uids.values():
        await here.handed_over(uid)
        here.operate(uid, code="AwaitingCapacity", because="gang needs 2 nodes, 1 free")

    async def seen() -> Any:
        answer = await here.get(f"/jobs/{uids['b']}/why")
        return answer if answer["code"] == "AwaitingCapacity" else None

    why = await until(seen, "the reason")
    assert why["because"] == "gang needs 2 nodes, 1 free"
    place = {"position": 3, "ahead": 2, "queued": 3}
    assert why["queue"] == place | {"startsInSeconds": None, "expected": "", "holders": []}, "no node is known"
    assert ": 2 jobs come before this one in the queue" in why["next"][0]
    assert (await here.get(f"/jobs/{uids['c']}/why"))["queue"]["position"] == 1


@pytest.mark.parametrize(("cause", "word"), [(Cause.OUT_OF_MEMORY, "gang.resources.memory"), (Cause.STORAGE, "space")])
async def test_why_says_what_to_do(here: Platform, cause: Cause, word: str) -> None:
    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    failure = Failure(cause=cause, attempt=1, at=1.0, message="it broke", log_tail="…")
    here.operate(uid, phase=Phase.FAILED, code="X", because="no restart is left", last_failure=failure, finished_at=2.0)
    await here.phase(uid, "Failed")
    why = await here.get(f"/jobs/{uid}/why")
    assert (why["phase"], why["lastFailure"]["message"], why["queue"]) == ("Failed", "it broke", None)
    assert any(word in step for step in why["next"])
