"""Evaluation sets by name: which metrics there will be, and which of them may decide."""

from typing import Any

import pytest

from muster.plan.outcome import best_checkpoint, outcome_warnings
from muster.recipe.training import TrainingConfig
from muster.words.base import InvalidDocument, dump, parse
from muster.words.status import JobStatus

HELD: dict[str, Any] = {"data": [{"source": "held.jsonl"}]}


def config(
    evaluation: dict[str, Any], task: str = "pretrain", top: dict[str, Any] | None = None, **data: Any
) -> TrainingConfig:
    return parse(
        TrainingConfig,
        {
            "task": task,
            "model": {"from": {"job": "base"}},
            "data": {"train": [{"source": "a"}], **data},
            "batch": {"tokensPerStep": 512},
            "length": {"steps": 9},
            "evaluation": {"every": 3, **evaluation},
            **(top or {}),
        },
        "training",
    )


@pytest.mark.parametrize(
    ("evaluation", "evaluations", "best", "warned"),
    [
        (
            {"holdout": 0.1},
            [(0, 5.4), (150, 3.72), (300, 3.94)],
            "The best checkpoint is step 150 (evaluation 3.7200); it overfits from there: the evaluation is 3.9400 at "
            "step 300.",
            (),
        ),
        (
            {"holdout": 0.1},
            [(0, 5.43), (150, 5.37), (300, 5.37)],
            "The best checkpoint is step 150 (evaluation 5.3700).",
            ("evaluation: it hardly improved, from 5.4300 before training to 5.3700 at best",),
        ),
        (
            {"sets": {"code": HELD}, "metric": "code/loss"},
            [(0, 5.0), (150, 2.0)],
            "The best checkpoint is step 150.",
            (),
        ),
        ({"holdout": 0.1}, [], "The best checkpoint is step 150.", ()),
    ],
)
def test_what_came_of_a_training(
    evaluation: dict[str, Any], evaluations: list[tuple[int, float]], best: str, warned: tuple[str, ...]
) -> None:
    training = config(evaluation, top={"optimizer": {"lr": 1e-5, "schedule": {"warmupSteps": 2}}})
    checkpoint = {"step": 300, "uri": "file:///ck", "committedAt": 1.0, "bestStep": 150}
    status = JobStatus.model_validate({"progress": {"step": 300}, "checkpoint": checkpoint})
    assert best_checkpoint(training, status, evaluations) == best
    assert outcome_warnings(training, status, evaluations) == warned
    assert best_checkpoint(training, JobStatus(), evaluations) == ""


def test_a_run_of_three_steps_is_warned_of_when_it_is_over() -> None:
    training = config({"holdout": 0.1}, top={"length": {"epochs": 3}, "optimizer": {"schedule": {"warmupSteps": 10}}})
    warm_up, length = outcome_warnings(training, JobStatus.model_validate({"progress": {"step": 3}}), [])
    assert warm_up.startswith("optimizer.schedule.warmupSteps: 10 steps of warm-up are all of the 3 steps of the run")
    assert length == "length: the run had 3 steps; few batches teach little"


def metrics(evaluation: dict[str, Any], **more: Any) -> tuple[str, ...]:
    found = config(evaluation, **more)
    assert found.evaluation is not None
    return found.evaluation.metrics(found.task, found.data.train)


def refusal(evaluation: dict[str, Any], **more: Any) -> str:
    with pytest.raises(InvalidDocument) as refused:
        config(evaluation, **more)
    return str(refused.value)


def test_the_metrics_of_each_set_and_source() -> None:
    assert metrics({"holdout": 0.1}) == ("loss", "perplexity", "bits_per_byte")
    two = [{"source": "a", "name": "wiki"}, {"source": "b"}]
    assert metrics({"holdout": 0.1, "sets": {"code": {"data": two}}}, train=two) == (
        "loss",
        "perplexity",
        "bits_per_byte",
        "sources/wiki/loss",
        "sources/1/loss",
        "code/loss",
        "code/perplexity",
        "code/bits_per_byte",
        "code/sources/wiki/loss",
        "code/sources/1/loss",
    )
    of_pairs = metrics({"sets": {"new": HELD}}, task="dpo")
    assert of_pairs[:2] == ("loss", "rewards/chosen")
    assert "new/rewards/margins" in of_pairs


VERIFIED = {
    "code": {**HELD, "answers": {"verifiers": [{"exactMatch": {}}, {"regex": {"pattern": "a"}, "name": "has-a"}]}}
}


def test_answers_have_metrics_of_their_own_of_which_more_is_better() -> None:
    found = metrics({"sets": VERIFIED}, task="sft")
    assert found[-5:] == tuple(
        f"code/{name}" for name in ("exact_match", "has-a", "score", "finished", "answer_tokens")
    )
    for metric in found[-5:-1]:
        asked = config({"sets": VERIFIED, "metric": metric}, task="sft").evaluation
        assert asked is not None
        assert asked.direction() == "higher"
    assert "does not say whether more or less" in refusal(
        {"sets": VERIFIED, "metric": "code/answer_tokens"}, task="sft"
    )


@pytest.mark.parametrize(
    ("task", "more", "words"),
    [
        ("pretrain", {}, "evaluation.sets.code.answers: the texts of task pretrain have no prompts"),
        ("reward", {}, "evaluation.sets.code.answers: a model of task reward scores texts"),
        ("sft", {"parallel": {"compile": True}}, "evaluation.sets.code.answers grows by a token a pass"),
    ],
)
def test_answers_that_there_can_not_be_are_refused(task: str, more: dict[str, Any], words: str) -> None:
    assert words in refusal({"sets": VERIFIED}, task=task, top=more)


def test_programs_have_metrics_of_their_limits_of_which_less_is_better() -> None:
    verified = {"code": {**HELD, "answers": {"verifiers": [{"unitTests": {}, "name": "runs"}]}}}
    limits = ["code/runs/out_of_time", "code/runs/out_of_memory"]
    assert list(metrics({"sets": verified}, task="sft")[-2:]) == limits
    for metric in limits:
        asked = config({"sets": verified, "metric": metric}, task="sft").evaluation
        assert asked is not None
        assert asked.direction() == "lower"


def test_two_verifiers_have_two_names() -> None:
    twice = {"code": {**HELD, "answers": {"verifiers": [{"exactMatch": {}}, {"exactMatch": {"column": "b"}}]}}}
    assert "two verifiers are called exact_match; give one of them a name" in refusal({"sets": twice}, task="sft")


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("loss", "lower"),
        ("new/loss", "lower"),
        ("new/rewards/accuracies", "higher"),
        ("rewards/margins", "higher"),
    ],
)
def test_a_metric_knows_its_direction(metric: str, better: str) -> None:
    found = config({"sets": {"new": HELD}, "metric": metric}, task="dpo")
    assert found.evaluation is not None
    assert found.evaluation.direction() == better
    other = {"higher": "lower", "lower": "higher"}[better]
    assert f"of {metric} the {better} is better" in refusal(
        {"sets": {"new": HELD}, "metric": metric, "better": other}, task="dpo"
    )


def test_what_can_not_be_judged_by_is_refused() -> None:
    assert "evaluation.metric 'code/los' is not reported; there will be loss, perplexity, bits_per_byte" in refusal(
        {**HELD, "metric": "code/los"}
    )
    assert "set evaluation.better to lower or higher" in refusal({**HELD, "metric": "logps/chosen"}, task="dpo")
    stated = config({**HELD, "metric": "logps/chosen", "better": "higher"}, task="dpo")
    assert stated.evaluation is not None
    assert stated.evaluation.direction() == "higher"


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        ({}, "give data (held-out sources), holdout"),
        ({**HELD, "holdout": 0.1}, "give either data (held-out sources) or holdout"),
        ({"sets": {"Code": HELD}}, "sets.Code: a name has lower-case letters"),
        ({"sets": {"code": {"data": []}}}, "evaluation.sets.code.data"),
        ({"sets": {f"s{n}": HELD for n in range(33)}}, "at most 32 are allowed"),
        ({"data": [{"source": "a", "name": "1"}, {"source": "b"}]}, "two sources are called 1"),
        ({"sets": {"code": {"data": [{"source": "a", "format": "preference"}]}}}, "format preference is not for task"),
    ],
)
def test_sets_that_say_nothing_or_twice(evaluation: dict[str, Any], words: str) -> None:
    assert words in refusal(evaluation)


def test_documents_of_earlier_releases_mean_what_they_meant() -> None:
    found = config({"data": [{"source": "held"}], "samples": 64, "earlyStopping": {"patience": 2}})
    assert found.evaluation is not None
    assert (found.evaluation.metric, found.evaluation.direction(), found.evaluation.sets) == ("loss", "lower", {})
    assert [path for path, _ in found.sources()] == ["data.train[0]", "evaluation.data[0]"]
    assert "name" not in dump(found)["data"]["train"][0]
