"""Step records among a log's lines are shown in words; whatever is none of the trainer's stays as it is."""

from __future__ import annotations

import json

import pytest

from muster.web.logs import of_rank
from muster.words.log_words import in_words, step_words
from muster.words.names import rank_mark

RECORD = {
    "type": "step",
    "step": 1200,
    "steps": 26000,
    "loss": 2.62301,
    "gradNorm": 1.19515,
    "lr": 0.001321,
    "tokensPerSecond": 1937.6,
    "stepSeconds": 1.0569,
}


def test_a_record_in_words_between_other_lines() -> None:
    text = f"model of 1 parameter\n{json.dumps(RECORD | {'evaluationLoss': 2.9393, 'mfu': 0.412})}\nend"
    assert in_words(text).split("\n") == [
        "model of 1 parameter",
        "step  1,200/26,000   loss 2.6230    grad 1.2        lr 0.00132    1.94k tokens/s     1.06 s   MFU 41.2%"
        "   evaluation loss 2.9393",
        "end",
    ]


def test_lines_stand_in_columns() -> None:
    long = {"step": 9, "gradNorm": 1.23e-05, "lr": 2e-3, "tokensPerSecond": 842.0, "stepSeconds": 0.0312, "loss": 11.25}
    first, second = in_words(f"{json.dumps(RECORD)}\n{json.dumps(RECORD | long)}").split("\n")
    for word in ("loss", "grad", "lr", "tokens/s"):
        assert first.index(word) == second.index(word)
    assert len(first) == len(second)


def test_the_evaluation_before_the_first_step() -> None:
    assert (
        step_words(json.dumps({"type": "step", "step": 0, "evaluationLoss": 5.3})) == "step 0   evaluation loss 5.3000"
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        '{"step": 1',
        '{"type": "event", "step": 1}',
        '{"type": "step", "step": "many"}',
        '{"type": "step", "step": 5}',
        '{"type": "step", "step": 5, "stepSeconds": [], "loss": {}}',
        '{"type": "step", "step": 1e999}',
        json.dumps(RECORD) + " " * 5_000,
        '["step"]',
    ],
)
def test_what_no_trainer_wrote_stays(line: str) -> None:
    assert in_words(line) == line


def test_a_loss_that_is_no_number_is_said() -> None:
    assert "loss nan" in step_words(json.dumps(RECORD | {"loss": float("nan")}))


def test_the_lines_of_one_rank() -> None:
    text = f"launcher\n{rank_mark(3)}three\nfirst\n{rank_mark(13)}thirteen\n{rank_mark(3)}more of three\n"
    assert of_rank(text, 3, first_rank=2) == "three\nmore of three\n"
    assert of_rank(text, 2, first_rank=2) == "launcher\nfirst\n"
    assert of_rank(text, 1, first_rank=2) == ""
