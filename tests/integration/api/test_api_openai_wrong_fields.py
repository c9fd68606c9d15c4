"""/v1's requests with each field wrong in turn: the error names it as the request does, and nothing is made."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.openai_house import chat_file, openai_platform
from tests.integration.api.platform import Platform

from muster.api.openai.chat.pool import WorkerPool


def hyper(**numbers: Any) -> dict[str, Any]:
    return {"method": {"type": "supervised", "supervised": {"hyperparameters": numbers}}}


def rewarded(grader: dict[str, Any], **numbers: Any) -> dict[str, Any]:
    return {
        "method": {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": numbers}},
        "model": "org/whole",
    }


GRADER, REWARDED = "method.reinforcement.grader", "method.reinforcement.hyperparameters"
ANSWER = {"type": "string_check", "input": "{{sample.output_text}}"}
EQ = {**ANSWER, "name": "Exact", "operation": "eq", "reference": "{{ item.answer }}"}
SUM = {
    "type": "multi",
    "name": "both",
    "graders": {"a": EQ, "b": EQ | {"reference": "42"}},
    "calculate_output": "a + b",
}
NUMBERS = "method.supervised.hyperparameters"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"model": "gpt-4o-mini"}, "model"),
    ({"model": "ft:tiny:default::00000000-0000-4000-8000-000000000000"}, "model"),
    ({"training_file": None}, "training_file"),
    ({"training_file": ["file-abc"]}, "training_file"),
    ({"training_file": "chat.jsonl"}, "training_file"),
    ({"training_file": "ftp://host/chat.jsonl"}, "training_file"),
    ({"validation_file": 3}, "validation_file"),
    ({"validation_file": "nothing"}, "validation_file"),
    ({"suffix": "a b"}, "suffix"),
    ({"suffix": "x" * 65}, "suffix"),
    ({"suffix": ""}, "suffix"),
    ({"seed": "1"}, "seed"),
    ({"seed": -1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"metadata": {"k": 1}}, "metadata.k"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"metadata": "k=v"}, "metadata"),
    ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
    ({"method": {"type": "imitation"}}, "method.type"),
    ({"method": {"type": "reinforcement"}}, "method.reinforcement"),
    ({"method": {"type": "reinforcement", "reinforcement": {}}}, "method.reinforcement.grader"),
    ({"method": {"type": "supervised", "reinforcement": {"grader": EQ}}}, "method.reinforcement"),
    (rewarded(EQ | {"type": "text_similarity"}), f"{GRADER}.type"),
    (rewarded(EQ | {"type": "score_model", "model": "gpt-4o"}), f"{GRADER}.type"),
    (rewarded({"type": "string_check"}), f"{GRADER}.name"),
    (rewarded(EQ | {"name": ""}), f"{GRADER}.name"),
    (rewarded(EQ | {"input": "{{item.answer}}"}), f"{GRADER}.input"),
    (rewarded(EQ | {"input": None}), f"{GRADER}.input"),
    (rewarded(EQ | {"reference": "so: {{item.answer}}"}), f"{GRADER}.reference"),
    (rewarded(EQ | {"operation": "ne"}), f"{GRADER}.operation"),
    (rewarded(EQ | {"operation": "ilike"}), f"{GRADER}.operation"),
    (rewarded(EQ | {"operation": "near"}), f"{GRADER}.operation"),
    (rewarded(EQ | {"pattern": "x"}), f"{GRADER}.pattern"),
    (rewarded(EQ | {"verifier": {"exactMatch": {}}}), f"{GRADER}.verifier"),
    (rewarded({"type": "x_verifier", "name": "x"}), f"{GRADER}.verifier"),
    (rewarded({"type": "x_verifier", "name": "x", "verifier": {"regex": {"pattern": "("}}}), f"{GRADER}.verifier"),
    (rewarded({"type": "x_verifier", "name": "score", "verifier": {"exactMatch": {}}}), f"{GRADER}.verifier"),
    (rewarded(SUM | {"calculate_output": "a * b"}), f"{GRADER}.calculate_output"),
    (rewarded(SUM | {"calculate_output": "max(a, b)"}), f"{GRADER}.calculate_output"),
    (rewarded(SUM | {"calculate_output": "a"}), f"{GRADER}.calculate_output"),
    (rewarded(SUM | {"graders": {"a": EQ, "b": SUM}}), f"{GRADER}.graders.b.type"),
    (rewarded(SUM | {"graders": {"a": EQ, "b": EQ | {"operation": "ne"}}}), f"{GRADER}.graders.b.operation"),
    (rewarded(EQ, compute_multiplier=0), f"{REWARDED}.compute_multiplier"),
    (rewarded(EQ, eval_interval="often"), f"{REWARDED}.eval_interval"),
    (rewarded(EQ, eval_samples=0), f"{REWARDED}.eval_samples"),
    (rewarded(EQ, reasoning_effort="high"), f"{REWARDED}.reasoning_effort"),
    (rewarded(EQ, beta=0.1), f"{REWARDED}.beta"),
    (rewarded(EQ, batch_size=257), f"{REWARDED}.batch_size"),
    ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo"),
    ({"method": "dpo"}, "method"),
    (hyper(n_epochs=0), f"{NUMBERS}.n_epochs"),
    (hyper(n_epochs=51), f"{NUMBERS}.n_epochs"),
    (hyper(n_epochs="often"), f"{NUMBERS}.n_epochs"),
    (hyper(n_epochs=True), f"{NUMBERS}.n_epochs"),
    (hyper(n_epochs="auto", batch_size=3), f"{NUMBERS}.batch_size"),
    (hyper(batch_size=257), f"{NUMBERS}.batch_size"),
    (hyper(batch_size=4.0), f"{NUMBERS}.batch_size"),
    (hyper(learning_rate_multiplier=0), f"{NUMBERS}.learning_rate_multiplier"),
    (hyper(learning_rate_multiplier="fast"), f"{NUMBERS}.learning_rate_multiplier"),
    (hyper(beta=0.1), f"{NUMBERS}.beta"),
    ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
    ({"hyperparameters": {"batch_size": 6}}, "hyperparameters.batch_size"),
    ({"hyperparameters": {"learning_rate_multiplier": 900}}, "hyperparameters.learning_rate_multiplier"),
    ({"hyperparameters": {}, "method": {"type": "supervised"}}, "hyperparameters"),
    ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 3}}}}, "method.dpo.hyperparameters.beta"),
    ({"n_epochs": 3}, "n_epochs"),
]


async def test_every_field_is_named_when_it_is_wrong(tmp_path: Path) -> None:
    async with openai_platform(tmp_path) as (here, _):
        await refused(here, tmp_path)


async def refused(here: Platform, tmp_path: Path) -> None:
    good = {"model": "tiny", "training_file": chat_file(tmp_path)}
    missed = []
    for changes, param in WRONG:
        body = {key: value for key, value in (good | changes).items() if value is not None}
        reply = await here.client.post("/v1/fine_tuning/jobs", json=body)
        assert reply.status_code in (400, 404), (changes, reply.text)
        error = reply.json()["error"]
        as_meant = reply.status_code == (404 if error["code"] == "model_not_found" else 400)
        if (error["param"], error["type"], as_meant) != (param, "invalid_request_error", True):
            missed.append((changes, reply.status_code, error))
        assert reply.headers["x-should-retry"] == "false"
    assert missed == []
    assert (await here.get("/jobs"))["items"] == []


TURN = {"role": "user", "content": "hi"}
# Of both kinds of question.
ASKED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"model": ""}, "model"),
    ({"model": "gpt-4o-mini"}, "model"),
    ({"model": "job:00000000-0000-4000-8000-000000000000"}, "model"),
    ({"model": "tiny"}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 4_097}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ({"n": 2}, "n"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"user": "u" * 513}, "user"),
    ({"tools": []}, "tools"),
    ({"logit_bias": {"50256": -100}}, "logit_bias"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [TURN, {**TURN, "role": "wizard"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{**TURN, "content": 7}]}, "messages[0].content"),
    ({"messages": [{**TURN, "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"messages": [{**TURN, "name": "n" * 65}]}, "messages[0].name"),
    ({"messages": [{**TURN, "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [{**TURN, "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"store": True}, "store"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 7}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"stream": True, "prompt": ["a", "b"]}, "stream"),
    ({"stream": True, "logprobs": 1}, "stream"),
]


async def test_every_field_of_a_question_to_a_model_is_named_when_it_is_wrong(tmp_path: Path) -> None:
    questions = (
        ("/v1/chat/completions", {"model": "org/whole", "messages": [TURN]}, ASKED + CHAT),
        ("/v1/completions", {"model": "org/whole", "prompt": "hi"}, ASKED + COMPLETION),
    )
    missed = []
    async with openai_platform(tmp_path) as (here, _):
        for path, good, wrong in questions:
            for changes, param in wrong:
                body = {key: value for key, value in (good | changes).items() if value is not None}
                reply = await here.client.post(path, json=body)
                error = reply.json()["error"]
                status = 404 if error["code"] == "model_not_found" else 400
                if (error["param"], error["type"], reply.status_code) != (param, "invalid_request_error", status):
                    missed.append((path, changes, reply.status_code, error))
    assert missed == []


async def test_a_server_that_answers_no_prompts_says_why_and_what_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chart's own image, which has no torch."""
    asked = {"model": "org/whole", "messages": [TURN]}
    async with openai_platform(tmp_path) as (here, _):

        async def told() -> str:
            reply = await here.client.post("/v1/chat/completions", json=asked)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
            return str(reply.json()["error"]["message"])

        find = importlib.util.find_spec
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, *more: None if name == "torch" else find(name, *more)
        )
        assert "it has no trainer beside it (docs/install.md" in await told()
        here.services[WorkerPool].workers_max = 0
        assert "MUSTER_API_CHAT_WORKERS is 0. `muster serve JOB`" in await told()
