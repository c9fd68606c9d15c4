"""The attempts' steps as one history."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from muster.api.metrics.steps import Step, StepLogs, merged, thinned
from muster.contract.layout import State


def steps(attempt: int, first: int, last: int) -> list[Step]:
    return [Step(step, attempt, None, b"{}") for step in range(first, last + 1)]


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 30)), max_size=8))
def test_merged_holds_each_step_once_as_it_was_trained_last(lives: list[tuple[float, int]]) -> None:
    """Each life resumes at or before where training stood and does some steps."""
    attempts, stood = [], 0
    expected: dict[int, int] = {}
    for number, (share, length) in enumerate(lives, start=1):
        resumed = int(share * stood)
        attempts.append(steps(number, resumed + 1, resumed + length))
        stood = resumed + length
        expected = {step: attempt for step, attempt in expected.items() if step <= resumed}
        expected |= dict.fromkeys(range(resumed + 1, stood + 1), number)
    assert {step.step: step.attempt for step in merged(attempts)} == expected
    assert [step.step for step in merged(attempts)] == sorted(expected)


@given(st.integers(0, 500), st.integers(1, 60))
def test_thinned_keeps_order_ends_and_the_limit(length: int, points: int) -> None:
    whole = steps(1, 1, length)
    some = thinned(whole, points)
    assert len(some) == min(length, points)
    assert [step.step for step in some] == sorted({step.step for step in some})
    if length and points > 1:
        assert (some[0], some[-1]) == (whole[0], whole[-1])


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    logs, state = StepLogs(State(tmp_path)), State(tmp_path)
    assert logs.history("u") == []
    folder = state.worker("u", 1, 0)
    folder.mkdir(parents=True)
    (folder.parent / "not-a-worker").mkdir()
    (state.attempt("u", 1).parent / "attempt-x").mkdir()
    file = folder / "steps.jsonl"
    line = json.dumps({"step": 1, "loss": 2.0, "evaluationLoss": 2.5})
    file.write_text(line[:10])
    assert logs.history("u") == []
    file.write_text(line + "\nnot json\n[1]\n" + '{"step": "x"}\n{"loss": 1}\n')
    (first,) = logs.history("u")
    assert (first.step, first.attempt, first.evaluation_loss) == (1, 1, 2.5)
    assert first.document()["loss"] == 2.0
