"""Words about programs: what is known of one, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from muster.plan.advice import advice
from muster.plan.plan_words import program_facts
from muster.words.signals import Cause
from muster.words.status import CheckpointStatus, Failure, JobStatus, Phase

SPEC: dict[str, Any] = {"program": {"command": ["train.py", "--name", "a b"], "launcher": "torchrun"}}


def told(status: JobStatus) -> list[str]:
    return advice(status, suspend=False, cancel=False, handed_over=True, ahead=0, spec=SPEC, name="mine")


def test_a_program_says_that_it_resumes_itself_and_only_if_it_can() -> None:
    assert program_facts({"training": {}}, {}) == []
    command = ("program", "train.py --name 'a b'  (once per rank)")
    begins = ("resumes", "no checkpoint of the program's is kept yet, so that a restart begins anew")
    assert program_facts(SPEC, {}) == [command, begins]
    resumes = ("resumes", "by the program; data position not checked")
    assert program_facts(SPEC, {"checkpoint": {"step": 3}}) == [command, resumes]
    assert program_facts(SPEC, {"finishedAt": 9.0}) == [command], "there is no restart to come"
    base = {"job": "pretrain", "uri": "s3://ck/uid", "step": 1200}
    inputs = {"base": base, "old": {"uri": "s3://ck/old", "step": "last"}, "model": {"source": "hf://org/name@v1"}}
    with_inputs = {"program": {**SPEC["program"], "inputs": inputs}}
    words = "base: pretrain (step 1200)\nold: s3://ck/old (step last)\nmodel: hf://org/name@v1"
    assert program_facts(with_inputs, {}) == [command, ("inputs", words), begins]
    after = {"program": {**SPEC["program"], "after": {"job": "pretrain", "each": "kept"}}}
    assert program_facts(after, {}) == [command, ("evaluates", "each checkpoint of job pretrain")]
    numbers = {"results": {"b/acc": 0.5, "a": 1234567.0}}
    assert program_facts(SPEC, numbers) == [command, begins, ("results", "a 1.23457e+06, b/acc 0.5")]
    left_out = {"resultsFault": "results.json is no JSON"}
    assert program_facts(SPEC, left_out)[-1] == ("results", "left out: results.json is no JSON")
    none = {"program": {"command": ["bash"], "launcher": "none"}}
    assert program_facts(none, {})[0] == ("program", "bash  (once per worker)")


def test_nobody_is_told_to_chat_with_a_program() -> None:
    words = " ".join(told(JobStatus(phase=Phase.SUCCEEDED)))
    assert "muster chat" not in words
    assert "muster logs mine" in words


def test_a_programs_failures_name_no_setting_of_a_training() -> None:
    checkpoint = CheckpointStatus(step=7, uri="file:///ck/1", committed_at=1.0)
    for cause in (Cause.OUT_OF_MEMORY, Cause.NUMERIC, Cause.INFRASTRUCTURE, Cause.USER_ERROR):
        failure = Failure(cause=cause, attempt=1, message="no", exit_code=81, at=1.0)
        words = " ".join(told(JobStatus(phase=Phase.FAILED, last_failure=failure, checkpoint=checkpoint)))
        assert "training." not in words
        assert "model.from" not in words
        assert ("program.inputs" in words) is (cause is not Cause.USER_ERROR)


@pytest.mark.parametrize("code", ["CrashLoop", "RepeatedFailure", "DeadlineExceeded"])
def test_a_program_that_was_given_up_is_advised_on_no_setting_of_a_training(code: str) -> None:
    steps = " ".join(told(JobStatus(phase=Phase.FAILED, code=code)))
    assert "training." not in steps
    assert "checkpoint.every" not in steps
    assert "checkpoint" in steps
