"""Tokens that a job adds: which ids and rows they get, what the rows begin with, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model_families import edit_json, write_model
from tests.unit.models.test_models_folder import training

from muster.storage.file_store import FileStore
from muster.storage.model_folder import open_folder
from muster.trainer.errors import UserError
from muster.trainer.models.lazy_tensors import GrownTable, LazyTensor
from muster.trainer.train import origin

TOKENS = [f"<tool-{number}>" for number in range(31)]  # the vocabulary has 259 ids, the tables 288 rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models") / "llama"
    write_model(found, "llama-3.1", torch.bfloat16)
    return found


def begun(folder: Path, tokens: list[str], **changes: Any) -> Any:
    data = {"train": [{"source": "x"}], "sequenceLength": 64, "addTokens": tokens}
    return origin._from_folder(training(folder.as_uri(), data=data, **changes), folder.as_uri())


@pytest.mark.parametrize("count", [2, 31])
def test_rows_begin_as_the_mean_of_the_tokens_there_were(folder: Path, count: int) -> None:
    """Two tokens take rows that were padding, the last two of 31 rows that there were none of."""
    found = begun(folder, TOKENS[:count])
    model = found.model.build(torch.float32, "none")
    found.model.fill(model, torch.device("cpu"), 0, values=True)
    new = [259 + number for number in range(count)]
    assert found.tokenizer.encode(f"a{TOKENS[0]}b{TOKENS[count - 1]}")[1::2] == [new[0], new[-1]]
    assert found.model.vocab_size == max(288, new[-1] + 1)
    store = plain(folder)
    before = {n: LazyTensor(store, slot, torch.float32, lambda _: None)[...] for n, slot in store.tensors.items()}
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    for name, parameter in model.named_parameters():
        if name not in tables:
            assert torch.equal(parameter, before[name])
            continue
        mean = before[name][:259].double().sum(dim=0).div(259).float()
        assert torch.equal(parameter[new], mean.expand(count, -1))
        others = [row for row in range(288) if row not in new]
        assert torch.equal(parameter[others], before[name][others])


def plain(folder: Path) -> Any:
    return open_folder(FileStore(folder))


def test_any_rows_of_a_grown_table_are_those_of_the_whole(folder: Path) -> None:
    store = plain(folder)
    mean = torch.randn(32)

    def table() -> GrownTable:
        lazy = LazyTensor(store, store.tensors["lm_head.weight"], None, lambda _: None)
        return GrownTable(lazy, 291, (259, 287, 288, 289, 290), mean)

    whole = table()[...]
    assert whole.shape == (291, 32)
    for start, stop in ((0, 100), (250, 289), (288, 291), (289, 290), (291, 291), (0, 291)):
        assert torch.equal(table()[slice(start, stop), slice(None)], whole[start:stop])


def test_what_can_not_be_added(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has '<\|im_end\|>' \(258\), 'a' \(\d+\) already; leave out"):
        begun(folder, ["<new>", "<|im_end|>", "a"])
    with pytest.raises(ValueError, match=r"names a token twice: '<new>'"):
        begun(folder, ["<new>", "<new>"])
    with pytest.raises(ValueError, match=r"white space"):
        begun(folder, [" "])
    with pytest.raises(ValueError, match=r"addTokens adds to the tokenizer of a model's folder .*give model.source"):
        training(
            folder.as_uri(),
            model={"preset": "muster-60m"},
            data={"train": [{"source": "x"}], "addTokens": ["<a>"], "sequenceLength": 64},
        )
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    data = {"train": [{"source": "x"}], "addTokens": ["<a>"], "tokenizer": str(tmp_path / "tokenizer.json")}
    bare = training((tmp_path / "bare").as_uri(), data=data | {"sequenceLength": 64})
    with pytest.raises(UserError, match=r"has no tokenizer.json that they could be added to"):
        origin._from_folder(bare, (tmp_path / "bare").as_uri())
    shutil.copytree(folder, tmp_path / "other")
    edit_json(tmp_path / "other" / "config.json", vocab_size=200)
    with pytest.raises(UserError, match=r"says vocab_size 200 in its config.json, and its tokenizer has 259 tokens"):
        begun(tmp_path / "other", ["<a>"])


@pytest.mark.parametrize(
    ("family", "saved", "lacking"),
    [
        ("llama-3.1", [], "embed_tokens, lm_head"),
        ("llama-3.1", ["embed_tokens"], "lm_head"),
        ("qwen3", [], "embed_tokens"),
    ],
)
def test_an_adapter_must_train_the_tables(tmp_path: Path, family: str, saved: list[str], lacking: str) -> None:
    write_model(tmp_path, family)
    with pytest.raises(UserError, match=rf"would never be learnt; .*adapter.modulesToSave: \[{lacking}\]"):
        begun(tmp_path, ["<a>"], adapter={"targets": ["q_proj"], "modulesToSave": saved})
    both = ["embed_tokens"] if family == "qwen3" else ["embed_tokens", "lm_head"]
    begun(tmp_path, ["<a>"], adapter={"targets": ["q_proj"], "modulesToSave": both})
