"""What verifiers read of records stands beside the prompts, whatever the format."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.making import write_jsonl

from muster.recipe.training import TrainingConfig
from muster.trainer.data import RunData, load_tokenizer, open_data
from muster.trainer.errors import UserError
from muster.words.base import parse

TRAIN = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]


def opened(folder: Path, records: list[Any], *verifiers: dict[str, Any], **more: Any) -> RunData:
    train, held = write_jsonl(folder / "train.jsonl", TRAIN), write_jsonl(folder / "held.jsonl", records)
    document = {
        "task": "sft",
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": str(train)}], "sequenceLength": 16, **more},
        "batch": {"tokensPerStep": 16},
        "length": {"steps": 1},
        "evaluation": {
            "every": 1,
            "sets": {"held": {"data": [{"source": str(held)}], "answers": {"verifiers": list(verifiers)}}},
        },
    }
    return open_data(parse(TrainingConfig, document), load_tokenizer("bytes"), folder / "cache", lambda line: None)


def test_a_prompt_has_the_columns_of_its_record(tmp_path: Path) -> None:
    records = [{"prompt": f"{n} plus 1 is ", "completion": str(n + 1), "tests": [n]} for n in range(20)]
    data = opened(tmp_path, records, {"exactMatch": {}}, {"regex": {"column": "tests"}})
    prompts = data.prompts["held"]
    found = {bytes(prompts[n].ids).decode(): prompts[n].columns for n in range(len(prompts))}
    assert found == {one["prompt"]: {"answer": one["completion"], "tests": one["tests"]} for one in records}
    # The order is that of the contents: another order of the lines is the same set.
    again = opened(tmp_path / "again", records[::-1], {"exactMatch": {}}, {"regex": {"column": "tests"}}).prompts[
        "held"
    ]
    assert [prompts[n] for n in range(20)] == [again[n] for n in range(20)]


def test_a_conversation_is_asked_up_to_the_first_answer(tmp_path: Path) -> None:
    turns = [("user", "what?"), ("assistant", "this"), ("user", "long ago"), ("assistant", "that")]
    record = {"messages": [{"role": role, "content": words} for role, words in turns]}
    asked = opened(tmp_path, [record], {"exactMatch": {}}).prompts["held"][0]
    assert load_tokenizer("bytes").decode(asked.ids) == "what?"
    assert asked.columns == {"answer": "this"}
    assert len(asked.ids) == len("what?") + 3  # the marks: a user's turn, its end, and the assistant's


def test_only_the_end_of_a_long_prompt_is_given(tmp_path: Path) -> None:
    records = [{"prompt": "abcdefgh" * 9, "completion": "z"}, {"prompt": "short", "completion": "z"}]
    prompts = opened(tmp_path, records, {"exactMatch": {}}).prompts["held"]
    asked = [bytes(prompts[number].ids).decode() for number in range(len(prompts))]
    assert sorted(asked) == ["abcdefgh" * 2, "short"]


def test_a_record_without_the_column_is_refused_with_its_place(tmp_path: Path) -> None:
    records = [{"prompt": "a", "completion": "1", "tests": "x"}, {"prompt": "b", "completion": "2"}]
    with pytest.raises(UserError, match=r"held.jsonl, line 2: has no column 'tests', which verifier unit_tests reads"):
        opened(tmp_path, records, {"unitTests": {}})
    with pytest.raises(UserError, match=r"held.jsonl, line 2: column answer is 'many', which has no number"):
        opened(tmp_path, [records[0], {"prompt": "b", "completion": "many"}], {"numericAnswer": {}})


def test_a_set_without_prompts_is_refused(tmp_path: Path) -> None:
    data = opened(tmp_path, [{"prompt": "b", "completion": "2"}], {"exactMatch": {}}, trainOn="all")
    with pytest.raises(UserError, match="has no prompt before the first token in the loss"):
        data.prompts["held"][0]


def test_stores_are_made_anew_for_other_columns(tmp_path: Path) -> None:
    records = [{"prompt": "a", "completion": "1", "x": "2"}]
    one = opened(tmp_path, records, {"exactMatch": {}}).prompts["held"][0].columns
    other = opened(tmp_path, records, {"exactMatch": {"column": "x"}}).prompts["held"][0].columns
    assert (one, other) == ({"answer": "1"}, {"x": "2"})
    assert json.dumps(one)
