"""The formats of training data: which task reads which, and which of them a record looks like. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Format = Literal[
    "auto",
    "text",
    "jsonl",
    "openai-chat",
    "sharegpt",
    "alpaca",
    "prompt-completion",
    "preference",
    "unpaired-preference",
]

# What a document's loss covers is marked token by token in these; in the others every token counts.
CONVERSATIONS: Final = frozenset({"openai-chat", "sharegpt", "alpaca", "prompt-completion"})
# What each task can learn from.
FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    "pretrain": ("text", "jsonl"),
    "sft": ("openai-chat", "sharegpt", "alpaca", "prompt-completion"),
    "dpo": ("preference",),
    "orpo": ("preference",),
    "simpo": ("preference",),
    "kto": ("unpaired-preference",),
    "reward": ("preference",),
    "grpo": ("openai-chat", "sharegpt", "alpaca", "prompt-completion"),
}
SHAPES: Final[Mapping[str, str]] = {
    "openai-chat": '{"messages": [{"role": …, "content": …}, …]}',
    "sharegpt": '{"conversations": [{"from": …, "value": …}, …]}',
    "alpaca": '{"instruction": …, "input": …, "output": …}',
    "prompt-completion": '{"prompt": …, "completion": …}',
    "preference": '{"prompt": …, "chosen": …, "rejected": …}',
    "unpaired-preference": '{"prompt": …, "completion": …, "label": true}',
}


def fits_task(format: str, task: str) -> bool:
    """Whether a source of this format can serve the task; `auto` may, as far as is known before its files are seen."""
    return format == "auto" or format in FORMATS[task]


def looks_like(record: object, field: str = "text") -> str | None:
    """The format whose columns a record has, after `columns` has renamed them; None for none of them.

    `field` is the column that holds a document of format jsonl.
    """
    if not isinstance(record, Mapping):
        return None
    if _turns(record.get("messages"), "role"):
        return "openai-chat"
    if _turns(record.get("conversations"), "from"):
        return "sharegpt"
    if {"chosen", "rejected"} <= record.keys() or {"preferred_output", "non_preferred_output"} <= record.keys():
        return "preference"
    if {"prompt", "completion", "label"} <= record.keys():
        return "unpaired-preference"
    if {"prompt", "completion"} <= record.keys():
        return "prompt-completion"
    if {"instruction", "output"} <= record.keys():
        return "alpaca"
    return "jsonl" if isinstance(record.get(field), str) else None


def _turns(value: object, key: str) -> bool:
    if isinstance(value, str):  # a table of text columns holds the list as JSON
        return value.lstrip().startswith("[")
    return isinstance(value, list) and (not value or (isinstance(value[0], Mapping) and key in value[0]))


def columns_of(record: object) -> str:
    """The names of a record's columns, for messages."""
    names = sorted(map(str, record)) if isinstance(record, Mapping) else []
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "") or "none"


def wrong_format(format: str, task: str) -> str:
    """What is said of a format that the task can't learn from."""
    return f"format {format} is not for task {task}, which reads {', '.join(FORMATS[task])}"
