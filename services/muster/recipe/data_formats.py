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
    """Return whether a source of this format can serve the task. `auto` can, until its files are read."""
    return format == "auto" or format in FORMATS[task]


def looks_like(record: object, field: str = "text", task: str | None = None) -> str | None:
    """The format whose columns a record has, after `columns` has renamed them; None for none of them. Where it has
    those of several, as a data set of preferences that is published with `messages` alongside `chosen` and `rejected`,
    it is one that the task reads.

    `field` is the column that holds a document of format jsonl.
    """
    shapes = shapes_of(record, field)
    return next((format for format in shapes if task is not None and fits_task(format, task)), next(iter(shapes), None))


def shapes_of(record: object, field: str = "text") -> list[str]:
    """Return every format whose columns a record has, the most specific one first."""
    if not isinstance(record, Mapping):
        return []
    answers = {"prompt", "completion"} <= record.keys()
    has = {
        "preference": {"chosen", "rejected"} <= record.keys()
        or {"preferred_output", "non_preferred_output"} <= record.keys(),
        "openai-chat": _turns(record.get("messages"), "role"),
        "sharegpt": _turns(record.get("conversations"), "from"),
        "unpaired-preference": answers and "label" in record,
        "prompt-completion": answers and "label" not in record,  # else bad answers would be learnt like good ones
        "alpaca": {"instruction", "output"} <= record.keys(),
        "jsonl": isinstance(record.get(field), str),
    }
    return [format for format, there in has.items() if there]


def _turns(value: object, key: str) -> bool:
    if isinstance(value, str):  # a table of text columns holds the list as JSON
        return value.lstrip().startswith("[")
    return isinstance(value, list) and (not value or (isinstance(value[0], Mapping) and key in value[0]))


def columns_of(record: object) -> str:
    """The names of a record's columns, for messages."""
    names = sorted(map(str, record)) if isinstance(record, Mapping) else []
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "") or "none"


def wrong_format(format: str, task: str) -> str:
    """Return the message for a format that the task can't learn from."""
    return f"format {format} is not for task {task}, which reads {', '.join(FORMATS[task])}"
