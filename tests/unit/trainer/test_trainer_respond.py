"""The tool behind /v1/chat/completions: what it answers line by line, what it counts, and what it refuses."""

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model_families import write_model
from tests.polling import WAIT_SECONDS_MAX
from transformers import AutoModelForCausalLM

from muster.trainer.convert import generate, load_model, respond
from muster.trainer.convert.load_model import LoadedModel, load
from muster.trainer.errors import UserError
from muster.trainer.models.generation import SamplingSettings

ASKED = {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "seed": 0, "stop": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(str(folder), "best")


def answer(loaded: LoadedModel, **request: Any) -> tuple[str, dict[str, Any]]:
    lines = list(respond.ModelResponder(loaded).respond({**ASKED, **request}))
    return "".join(line.get("text", "") for line in lines), lines[-1]["done"]


def test_an_answer_is_that_of_generate_and_is_counted(loaded: LoadedModel) -> None:
    text, done = answer(loaded, prompt="abc")
    assert text == "".join(generate.continued(loaded, "abc", SamplingSettings(8)))
    ids = [*loaded.tokenizer.bos, *loaded.tokenizer.encode("abc")]
    assert done == {"finish_reason": "length", "prompt_tokens": len(ids), "completion_tokens": 8}
    assert answer(loaded, prompt=ids) == (text, done)
    before_it, ended = answer(loaded, prompt="abc", stop=[text[2:4]])
    assert (before_it, ended["finish_reason"]) == (text[: text.index(text[2:4])], "stop")
    messages = [{"role": "user", "content": "hi"}]
    said, _ = answer(loaded, messages=messages)
    assert said == "".join(generate.answered(loaded, messages, SamplingSettings(8)))


def test_log_probabilities_are_those_of_transformers(loaded: LoadedModel, folder: Path) -> None:
    ids = loaded.tokenizer.encode("hello world")
    text, done = answer(loaded, prompt=ids, max_tokens=0, echo=True, logprobs=2)
    found = done["logprobs"]
    assert text == "hello world" == "".join(found["tokens"])
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.log_softmax(theirs(torch.tensor([ids])).logits[0, :, : loaded.tokenizer.vocab_size], -1)
    for place in range(1, len(ids)):
        row = expected[place - 1]
        assert found["token_logprobs"][place] == pytest.approx(float(row[ids[place]]), abs=1e-4)
        assert max(found["top_logprobs"][place].values()) == pytest.approx(float(row.max()), abs=1e-4)
    _, written = answer(loaded, prompt=ids, max_tokens=3, logprobs=1)
    assert len(written["logprobs"]["tokens"]) == 3
    # At temperature 0 each token is the likeliest one.
    tops = [max(top.values()) for top in written["logprobs"]["top_logprobs"]]
    assert written["logprobs"]["token_logprobs"] == pytest.approx(tops)


def test_a_cancelled_answer_ends_and_what_can_not_be_asked_is_refused(loaded: LoadedModel) -> None:
    responder = respond.ModelResponder(loaded)
    lines = responder.respond({**ASKED, "prompt": "abc", "max_tokens": 10_000})
    next(lines)
    responder.cancelled.set()
    rest = list(lines)
    assert rest[-1]["done"]["completion_tokens"] < 10
    assert rest[-1]["done"]["finish_reason"] == "stop"
    with pytest.raises(UserError, match="the model knows"):
        answer(loaded, prompt=[loaded.definition.vocab_size])
    limit = loaded.definition.position_limit
    assert limit is not None
    with pytest.raises(UserError, match="shorten it"):
        answer(loaded, prompt=[1] * (limit + 1))


def test_requests_are_answered_line_by_line_until_input_ends(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [{**ASKED, "prompt": "abc"}, {**ASKED, "prompt": [10**6]}, {**ASKED, "prompt": "abc"}]
    told: list[dict[str, Any]] = []
    third = threading.Event()

    class Input(io.StringIO):
        """Ends only when the last request is answered: the end of input cancels what is being written."""

        def __iter__(self) -> Iterator[str]:  # type: ignore[override]
            yield from (json.dumps(request) for request in requests)
            third.wait(WAIT_SECONDS_MAX)

    def tell(line: dict[str, Any]) -> None:
        told.append(line)
        if sum("done" in each for each in told) == 2:
            third.set()

    monkeypatch.setattr("sys.stdin", Input())
    monkeypatch.setattr(respond, "_send", tell)
    assert respond.main(["--checkpoint", str(folder), "--step", "best"]) == 0
    ends = [line for line in told if "text" not in line]
    assert ends[0] == {"ready": True}
    assert [next(iter(line)) for line in ends[1:]] == ["done", "error", "done"]
    assert ends[2]["of"] == "request"


def test_a_model_larger_than_what_is_free_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1_000

    monkeypatch.setattr(load_model.psutil, "virtual_memory", Memory)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(respond, "_send", told.append)
    assert respond.main(["--checkpoint", str(folder), "--step", "best"]) != 0
    assert "of this machine's memory are free" in told[0]["error"]


def test_a_jobs_folder_is_never_taken_for_a_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may write there what looks like one, with links to what it may not read itself."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(respond, "_send", told.append)
    assert respond.main(["--checkpoint", str(folder), "--step", "best", "--of-job"]) != 0
    assert "holds no checkpoint" in told[0]["error"]
