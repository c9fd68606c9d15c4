"""A look at a model and data for the proposal of a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.plan.proposal import JobWishes, preliminary, propose
from muster.recipe.document import parse_job
from muster.storage.proposing import ProposalLook, look_for_proposal
from muster.storage.text_size import bytes_per_token, text_tokens

FOLDER = Path(__file__).parents[3] / "examples"


def look(data: Path, model: dict[str, object] | None = None) -> ProposalLook:
    wishes = JobWishes(name="mine", model=model or {"source": str(FOLDER / "tiny-model")}, data=str(data))
    return look_for_proposal(parse_job(preliminary(wishes)).spec.training_config)


def test_a_model_and_chats_are_looked_at() -> None:
    found = look(FOLDER / "chat.jsonl")
    assert found.facts.data is not None
    assert found.facts.data.formats == ("openai-chat",)
    assert found.facts.data.documents == pytest.approx(480, rel=0.01)
    assert (found.facts.parameters, found.model_fault, found.data_fault, found.gaps) == (820_992, "", "", ())


def test_pairs_are_no_fault_before_the_task_is_chosen(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    found = look(tmp_path / "pairs.jsonl")
    assert (found.data_fault, found.facts.data and found.facts.data.formats) == ("", ("preference",))


def test_columns_whose_names_tell_their_meaning_are_written_down(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\nwhat,that\n")
    found = look(tmp_path / "qa.csv")
    columns = {"prompt": "question", "completion": "answer"}
    assert found.facts.source == {"format": "prompt-completion", "columns": columns}
    wishes = JobWishes(name="mine", model={"preset": "muster-1m"}, data=str(tmp_path / "qa.csv"))
    source = parse_job(propose(wishes, found.facts).document).spec.training_config.data.train[0]
    assert source.columns is not None
    assert source.columns.renamed() == {"question": "prompt", "answer": "completion"}
    (tmp_path / "other.csv").write_text("this,that\n1,2\n")
    assert "columns that no format has: that, this" in look(tmp_path / "other.csv").data_fault


def test_what_is_not_there_is_a_fault_and_what_is_far_away_a_gap(tmp_path: Path) -> None:
    assert "does not exist" in look(tmp_path / "nosuch.jsonl").data_fault
    assert "holds no config.json" in look(FOLDER / "chat.jsonl", {"source": str(tmp_path)}).model_fault
    origin = {"from": {"job": "base", "step": "best"}}
    assert look(FOLDER / "chat.jsonl", origin).gaps == (
        "the size of the model: only a server knows where a job's checkpoints are",
    )


def test_a_token_has_as_many_bytes_as_its_vocabulary_allows() -> None:
    sizes = [bytes_per_token(vocabulary) for vocabulary in (1, 259, 512, 2_048, 32_768, 128_256, None)]
    assert sizes == [1.0, 1.0, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_turn_has_the_tokens_of_its_template() -> None:
    chat = {"messages": [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "ef"}]}
    assert text_tokens(chat, "openai-chat", "text", 1.0) == 26  # <|im_start|>user\nabcd<|im_end|>\n and the like
    assert text_tokens({"text": "abcd"}, "jsonl", "text", 4.0) == 1
