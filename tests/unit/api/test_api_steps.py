"""The attempts' steps as one history, and the curves of it."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.api.core.metrics import steps as step_files
from muster.api.core.metrics.curves import CurveQuery, curves_document
from muster.api.core.metrics.service import tokens_at
from muster.api.core.metrics.steps import StepHistory, StepLogs, chosen, finite_only, thinned
from muster.api.core.metrics.tables import SERIES_MAX
from muster.words.state_folder import StateFolder

Records = list[dict[str, Any]]


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"type": "step", "step": step, "at": 1000.0 + step, "tokens": 10, "loss": float(step), **more}


def write(state: StateFolder, attempt: int, records: Records, uid: str = "u") -> Path:
    folder = state.worker(uid, attempt, 0)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "steps.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in records)
    return path


def attempts_and_steps(history: StepHistory) -> list[tuple[int, int]]:
    return [(span.attempt, step) for span in history.trained for step in span.table.steps[span.begin : span.end]]


lives = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 120)), max_size=6)


@given(lives)
@settings(deadline=None, max_examples=40)
def test_history_holds_each_step_once_as_it_was_trained_last(lives: list[tuple[float, int]]) -> None:
    """Each life resumes at or before where training stood and does some steps."""
    with tempfile.TemporaryDirectory() as folder:
        state, stood = StateFolder(Path(folder)), 0
        expected: dict[int, int] = {}
        for number, (share, length) in enumerate(lives, start=1):
            resumed = int(share * stood)
            write(state, number, [record(step) for step in range(resumed + 1, resumed + length + 1)])
            stood = resumed + length
            expected = {step: attempt for step, attempt in expected.items() if step <= resumed}
            expected |= dict.fromkeys(range(resumed + 1, stood + 1), number)
        history = StepLogs(state).history("u")
        assert attempts_and_steps(history) == [(attempt, step) for step, attempt in sorted(expected.items())]
        for step in (0, stood // 2, stood):
            assert tokens_at(history, step) == 10 * step


@given(lives, st.integers(2, 60), st.data())
@settings(deadline=None, max_examples=40)
def test_curves_keep_every_extreme_and_the_mean(lives: list[tuple[float, int]], points: int, data: Any) -> None:
    """Whatever is thinned and whatever part is asked for: against all records at once."""
    with tempfile.TemporaryDirectory() as folder:
        state, stood = StateFolder(Path(folder)), 0
        expected: dict[int, float] = {}
        for number, (share, length) in enumerate(lives, start=1):
            resumed = int(share * stood)
            trained = range(resumed + 1, resumed + length + 1)
            losses = [(step * 7919 + number * 104_729) % 73 / 4 for step in trained]
            write(state, number, [record(step, loss=loss) for step, loss in zip(trained, losses, strict=True)])
            stood = resumed + length
            expected = {step: loss for step, loss in expected.items() if step <= resumed}
            expected |= dict(zip(trained, losses, strict=True))
        low, high = sorted((data.draw(st.integers(0, stood + 1)), data.draw(st.integers(0, stood + 1))))
        history = StepLogs(state).history("u")
        found = curves_document(history, CurveQuery(points, "step", low, high))
        part = {step: loss for step, loss in expected.items() if low <= step <= high}
        assert found["total"] == len(part)
        assert len(found["axes"]["step"]) <= points + 2 * len(lives)
        assert found["axes"]["step"] == sorted(found["axes"]["step"])
        if part:
            loss = found["series"]["loss"]
            assert min(loss.get("min", loss["mean"])) == min(part.values())
            assert max(loss.get("max", loss["mean"])) == max(part.values())
            if not found["thinned"]:
                assert dict(zip(found["axes"]["step"], loss["mean"], strict=True)) == part


@given(st.integers(0, 500), st.integers(1, 60))
def test_the_records_that_are_chosen_keep_order_ends_and_the_limit(length: int, points: int) -> None:
    some = chosen(length, points)
    assert len(some) == min(length, points)
    assert some == sorted(set(some))
    if length and points > 1:
        assert (some[0], some[-1]) == (0, length - 1)


def test_a_spike_of_one_step_in_many_is_kept_on_every_axis(tmp_path: Path) -> None:
    records = [record(step, loss=50.0 if step == 7_777 else 2.0) for step in range(1, 20_001)]
    write(StateFolder(tmp_path), 1, records)
    history = StepLogs(StateFolder(tmp_path)).history("u")
    for axis, unit in (("step", 1), ("tokens", 10), ("seconds", 1)):
        found = curves_document(history, CurveQuery(100, axis))  # type: ignore[arg-type]
        peak = found["series"]["loss"]["max"]
        assert (max(peak), len(peak) <= 100, found["thinned"]) == (50.0, True, True)
        assert abs(found["axes"][axis][peak.index(50.0)] - 7_777 * unit) <= 100 * unit
        near = curves_document(history, CurveQuery(100, axis, 7_770 * unit, 7_790 * unit))  # type: ignore[arg-type]
        assert not near["thinned"]
        assert max(near["series"]["loss"]["mean"]) == 50.0


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    logs, state = StepLogs(StateFolder(tmp_path)), StateFolder(tmp_path)
    assert logs.history("u") == StepHistory((), (), None, 0)
    folder = state.worker("u", 1, 0)
    folder.mkdir(parents=True)
    (folder.parent / "not-a-worker").mkdir()
    (state.attempt("u", 1).parent / "attempt-x").mkdir()
    file = folder / "steps.jsonl"
    line = json.dumps({"step": 1, "loss": 2.0, "evaluationLoss": 2.5})
    file.write_text(line[:10])
    assert attempts_and_steps(logs.history("u")) == []
    file.write_text(line + "\nnot json\n[1]\n" + '{"step": "x"}\n{"loss": 1}\n')
    history = logs.history("u")
    assert attempts_and_steps(history) == [(1, 1)]
    assert thinned(history.evaluated, 5) == [(1, {"step": 1, "loss": 2.0, "evaluationLoss": 2.5})]
    with file.open("a") as more:
        more.write('{"step": 2, "loss": 1.5}\n')
    assert curves_document(logs.history("u"), CurveQuery())["series"]["loss"] == {"mean": [2.0, 1.5]}


def test_one_series_alone_is_as_among_the_others(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    write(state, 1, [record(step, loss=4.0 / step, lr=1e-3, hardware={"cpuCores": 1.5}) for step in range(1, 40)])
    history = StepLogs(state).history("u")
    everything = curves_document(history, CurveQuery(10))["series"]
    assert "hardware.cpuCores" in everything
    for name in ("loss", "lr"):
        assert curves_document(history, CurveQuery(10, only=name))["series"] == {name: everything[name]}
    named = curves_document(history, CurveQuery(10, only="hardware.cpuCores"))["series"]
    assert named["hardware.cpuCores"] == everything["hardware.cpuCores"]


def test_what_one_look_does_not_read_is_told_and_read_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(StateFolder(tmp_path), 1, [record(step) for step in range(1, 1001)])
    monkeypatch.setattr(step_files, "READ_BYTES_MAX", 30_000)
    logs, seen = StepLogs(StateFolder(tmp_path)), []
    while not seen or seen[-1][1]:
        found = curves_document(logs.history("u"), CurveQuery())
        seen.append((found["total"], found["unread"]))
    looks = math.ceil(path.stat().st_size / 30_000)
    assert looks <= len(seen) <= looks + 1
    assert seen[0][0] < seen[1][0] < seen[-1][0] == 1000


def test_whatever_a_job_writes_into_its_records_is_survived(tmp_path: Path) -> None:
    """A job is code: its file may hold anything, and only its own curves suffer."""
    path = write(StateFolder(tmp_path), 1, [record(1)])
    hostile = [
        '{"step": 2, "loss": 1e999, "tokens": -5, "at": "yesterday"}',
        '{"step": 3, "loss": NaN, "gradNorm": Infinity, "values": {"a": "x", "<b>": 3, "n": null}}',
        '{"step": 4, "loss": ' + "9" * 400 + ', "values": 7}',
        '{"step": 2, "loss": 1.0}',
        '{"step": ' + "9" * 30 + "}",
        '{"step": true}',
        '{"step": 5, "loss": 5.0},{"step": 6}',
        '{"step": 7, "tokens": ' + "9" * 25 + ', "evaluationLoss": [1]}',
        json.dumps(record(8, values={f"name-{i}": 1.0 for i in range(500)})),
        '"' + "x" * 5_000_000 + '"',
        json.dumps(record(9, loss=3.0)),
    ]
    with path.open("a") as file:
        file.write("\n".join(hostile) + "\n")
    history = StepLogs(StateFolder(tmp_path)).history("u")
    assert [step for _, step in attempts_and_steps(history)] == [1, 2, 3, 4, 7, 8, 9]
    found = json.loads(json.dumps(curves_document(history, CurveQuery()), allow_nan=False))
    assert found["series"]["loss"]["mean"] == [1.0, None, None, None, None, 8.0, 3.0]
    assert len(found["series"]) <= SERIES_MAX + 1
    assert json.dumps([finite_only(each) for _, each in thinned(history.trained, 10)], allow_nan=False)
    path.unlink()
    assert curves_document(history, CurveQuery())["total"] == 7, "read by somebody else while it was deleted"
    assert thinned(history.trained, 10) == []
