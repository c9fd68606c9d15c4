"""What the tests of the data room make: configurations, files, a small Hugging Face tokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from muster.recipe.data_config import Source
from muster.recipe.training import TrainingConfig
from muster.trainer.data import RunData, load_tokenizer, open_data
from muster.trainer.data.prepare import prepared
from muster.trainer.data.store import TokenStore
from muster.words.base import parse

# How Llama 3 and Qwen 2.5 split words (tiktoken's cl100k pattern, but for the length of numbers).
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GEMMA = ["<eos>", "<start_of_turn>", "<end_of_turn>"]


def config(
    train: list[dict[str, Any]], length: int = 16, evaluation: dict[str, Any] | None = None, **data: Any
) -> TrainingConfig:
    """A training configuration around these sources; `data` overrides keys of its `data`."""
    sft = any(source.get("format") == "openai-chat" for source in train)
    document = {
        "task": "sft" if sft else "pretrain",
        "model": {"preset": "muster-1m"},
        "data": {"train": train, "sequenceLength": length, **data},
        "batch": {"tokensPerStep": length * 8},
        "length": {"steps": 1},
        "seed": 7,
    }
    return parse(TrainingConfig, document | ({"evaluation": evaluation} if evaluation else {}))


def opened(given: TrainingConfig, cache: Path, lines: list[str] | None = None) -> RunData:
    heard = [] if lines is None else lines
    return open_data(given, load_tokenizer(given.data.tokenizer), cache, heard.append)


def stored(source: Path | str, cache: Path, tokenizer: str = "bytes", **keys: Any) -> TokenStore:
    """The store of one source, in silence."""
    return prepared(Source(source=str(source), **keys), load_tokenizer(tokenizer), cache, lambda line: None)


def contents(store: TokenStore) -> list[bytes]:
    """Every document of a byte-level store in index order, without its last id (the end of document)."""
    lengths = store.bounds[1:] - store.bounds[:-1]
    return [
        bytes(store.tokens[start : start + length - 1].tolist())
        for start, length in zip(store.starts, lengths, strict=True)
    ]


def write_texts(folder: Path, texts: Iterable[str | bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:05}.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def write_jsonl(path: Path, records: Iterable[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat_record(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_tokenizer(path: Path, marks: list[str]) -> Path:
    """A byte-level BPE tokenizer.json with these special tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 50 + len(marks),
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, user system assistant model\n\n"] * 20, trainer
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
    return path
