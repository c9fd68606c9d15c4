"""Samples that a model wrote at its evaluations: one document for each, in the job's checkpoint folder."""

from __future__ import annotations

import re
from typing import Final

from muster.words.base import Record, Time

SAMPLES: Final = "samples/"
_KEY: Final = re.compile(r"samples/step-(\d{8,})\.json")


class Sample(Record):
    """Completion of one prompt. `finished` means that the model ended its text itself, before maxTokens."""

    prompt: str
    text: str
    finished: bool


class Samples(Record):
    """Samples of the evaluation after `step`."""

    step: int
    attempt: int
    at: Time
    samples: tuple[Sample, ...]


def samples_key(step: int) -> str:
    """Return the key of a step's samples in the job's checkpoint folder."""
    return f"{SAMPLES}step-{step:08}.json"


def step_of_samples(key: str) -> int | None:
    """The step that a key is of; None for what is no key of samples."""
    match = _KEY.fullmatch(key)
    return int(match[1]) if match else None
