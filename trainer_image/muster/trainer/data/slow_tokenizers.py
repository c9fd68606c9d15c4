"""Explanation for a folder without tokenizer.json, whose tokenizer can't be read: what it has instead, and how to
convert that.

Only fast tokenizers are read, those of the `tokenizers` library: one file describes all their behaviour, and no code is
run.
"""

from __future__ import annotations

import json
from collections.abc import Callable

# What slow tokenizers keep their vocabulary in, and what reads it.
SLOW_FILES = {
    "tokenizer.model": "sentencepiece (or tiktoken)",
    "spiece.model": "sentencepiece",
    "sentencepiece.bpe.model": "sentencepiece",
    "source.spm": "sentencepiece",
    "tekken.json": "mistral-common",
    "vocab.json": "Python code of transformers",
    "vocab.txt": "Python code of transformers",
}
CONVERT = "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` writes tokenizer.json"


def why_not_fast(configuration: str | None, exists: Callable[[str], bool]) -> str:
    """Return the explanation, one or two sentences for a message. `configuration` is the text of tokenizer_config.json,
    None where there is none; `exists` tells whether the folder has a file of that name."""
    from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS

    document = _document(configuration)
    named, code = document.get("tokenizer_class"), document.get("auto_map")
    kind = str(named).removesuffix("Fast") if named else None
    there = next((name for name in SLOW_FILES if exists(name)), None)
    if isinstance(code, dict) and "AutoTokenizer" in code:
        return (
            f"holds no tokenizer.json: its tokenizer ({kind or code['AutoTokenizer']}) is code of its own, which "
            "Muster never runs. Name a tokenizer.json of the same vocabulary in data.tokenizer"
        )
    if kind is None and there is None:
        return f"holds no tokenizer.json, nor any other tokenizer. Copy the one of its model; {CONVERT} of a slow one"
    slow = f"a {kind}" if kind else "one"
    source = f" ({there}, which {SLOW_FILES[there]} reads)" if there else ""
    words = (
        f"holds no tokenizer.json: its tokenizer is {slow} without its fast form{source}, and only fast ones are read."
    )
    converts = kind is None or kind in SLOW_TO_FAST_CONVERTERS or there in ("tokenizer.model", "tekken.json")
    if converts:
        return f"{words} {CONVERT}"
    return (
        f"{words} transformers converts no {kind}: take a model with a fast tokenizer, or name "
        "a tokenizer.json of the same vocabulary in data.tokenizer"
    )


def _document(text: str | None) -> dict[str, object]:
    try:
        parsed = json.loads(text) if text else {}
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
