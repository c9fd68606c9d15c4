"""Traces of a running job's steps: taken up once, ended at their step, kept with the job; what fails is told there."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.polling import eventually

from muster.storage.opening import open_store
from muster.trainer.config import RankPosition
from muster.trainer.train import profiling, tracing
from muster.trainer.train.activity import RankActivity
from muster.trainer.train.profiling import StepProfiler
from muster.words.base import dump_json
from muster.words.profiles import PROFILES, REQUEST_KEY, STEPS_MAX, Profile, ProfileRequest, RankProfile

CPU = torch.device("cpu")


@pytest.fixture
def profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepProfiler]:
    monkeypatch.setattr(profiling, "LOOK_SECONDS", 0.02)
    run: Any = SimpleNamespace(folder=tmp_path.as_uri(), attempt=2, worker_dir=tmp_path / "worker")
    made = StepProfiler(
        run, RankPosition(rank=0, world=1, local_rank=0, local_world=1), CPU, RankActivity(0.0, lambda: None)
    )
    yield made
    made.close(wait=True)


def ask(folder: Path, name: str = "first", attempt: int = 2, steps: int = 3, ranks: tuple[int, ...] = (0,)) -> None:
    request = ProfileRequest(id=name, attempt=attempt, steps=steps, ranks=ranks, at=1.8e9)
    (folder / f"{REQUEST_KEY}.new").write_text(dump_json(request))
    (folder / f"{REQUEST_KEY}.new").replace(folder / REQUEST_KEY)


def train(profiler: StepProfiler, first: int, last: int) -> None:
    """Steps as the loop makes them: what is asked goes through the reduction."""
    for step in range(first, last + 1):
        asked = profiler.asked
        torch.ones(64, 64) @ torch.ones(64, 64)
        profiler.stepped(step, asked)


def kept(folder: Path, step: int) -> tuple[Profile, RankProfile, Path]:
    at = folder / PROFILES / f"attempt-2-step-{step:08}"
    begun = Profile.model_validate_json((at / "profile.json").read_text())
    return begun, RankProfile.model_validate_json((at / "rank-0.json").read_text()), at


def test_the_steps_that_are_asked_for_are_traced_and_no_others(tmp_path: Path, profiler: StepProfiler) -> None:
    train(profiler, 1, 2)
    assert not (tmp_path / PROFILES).exists()
    ask(tmp_path)
    eventually(lambda: profiler.asked, "the request")
    train(profiler, 3, 9)
    profiler.close(wait=True)
    begun, done, at = kept(tmp_path, 4)
    assert (begun.id, begun.attempt, begun.step, begun.steps, begun.ranks) == ("first", 2, 4, 3, (0,))
    assert (done.rank, done.steps, done.fault) == (0, 3, "")
    assert {file.name: file.bytes for file in done.files} == {
        name: (at / name).stat().st_size for name in ("rank-0.trace.json.gz", "rank-0.memory.txt")
    }
    events = json.loads(gzip.decompress((at / "rank-0.trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert [name for name in names if name.startswith("ProfilerStep")] == [f"ProfilerStep#{n}" for n in (4, 5, 6)]
    assert names.count("aten::matmul") == 3
    assert "aten::ones" in (at / "rank-0.memory.txt").read_text()
    assert not (tmp_path / "worker" / "profile-rank-0").exists(), "nothing stays on the worker"


def test_a_request_of_another_attempt_or_one_that_nobody_can_read_is_left_alone(
    tmp_path: Path, profiler: StepProfiler
) -> None:
    watch, store = profiler._watch, open_store(tmp_path.as_uri())
    assert watch is not None
    ask(tmp_path, "stale", attempt=1)
    watch._look(store)
    assert not profiler.asked
    (tmp_path / REQUEST_KEY).write_text("{")
    with pytest.raises(ValidationError):
        watch._look(store)
    ask(tmp_path, "newer")
    eventually(lambda: profiler.asked, "the request")
    train(profiler, 1, 5)
    assert kept_ids(tmp_path, profiler) == ["newer"]


def test_a_request_is_served_once_and_a_later_one_after_it(tmp_path: Path, profiler: StepProfiler) -> None:
    ask(tmp_path, "first", steps=1)
    eventually(lambda: profiler.asked, "the request")
    train(profiler, 1, 1)
    ask(tmp_path, "second", steps=10**9, ranks=(-1, 0, 5))
    watch = profiler._watch
    assert watch is not None
    eventually(lambda: watch.waiting is not None, "the second request")
    assert not profiler.asked, "one at a time"
    train(profiler, 2, 3)
    assert profiler.active
    profiler.finish(3)
    assert kept_ids(tmp_path, profiler) == ["first", "second"]
    begun, done, _ = kept(tmp_path, 4)
    assert (begun.steps, begun.ranks, done.steps) == (STEPS_MAX, (0,), 0), "what does not exist is not traced"


def test_a_profiler_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, profiler: StepProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(tracing.profile, "start", broken)
    ask(tmp_path)
    eventually(lambda: profiler.asked, "the request")
    train(profiler, 1, 8)
    profiler.close(wait=True)
    _, done, _ = kept(tmp_path, 2)
    assert (done.files, done.fault) == ((), "RuntimeError: no profiler here")


def kept_ids(folder: Path, profiler: StepProfiler) -> list[str]:
    profiler.close(wait=True)
    documents = sorted((folder / PROFILES).glob("*/profile.json"))
    return [Profile.model_validate_json(each.read_text()).id for each in documents]
