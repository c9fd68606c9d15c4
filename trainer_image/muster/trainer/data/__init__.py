"""Data: text becomes token stores, stores become samples in an order that only (seed, epoch, sample) decide."""

from typing import TYPE_CHECKING, Any

from muster.trainer.data.chat import chat_prompt
from muster.trainer.data.dataset import RunData, SampleSet, open_data
from muster.trainer.data.packing import IGNORED, PADDING, PackedSample
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.data.tokenizer_files import (
    add_tokens,
    load_tokenizer,
    templated,
    tokenizer_from_commit,
    tokenizer_of_folder,
)

if TYPE_CHECKING:
    from muster.trainer.data.batch import TokenBatch
    from muster.trainer.data.loader import RankLoader, StepBatch

__all__ = [
    "IGNORED",
    "PADDING",
    "PackedSample",
    "RankLoader",
    "RunData",
    "SampleSet",
    "StepBatch",
    "TokenBatch",
    "Tokenizer",
    "add_tokens",
    "chat_prompt",
    "load_tokenizer",
    "open_data",
    "templated",
    "tokenizer_from_commit",
    "tokenizer_of_folder",
]


def __getattr__(name: str) -> Any:
    """Import the names that depend on torch when they are first used: torch takes seconds and 200 MB to import, and a
    process that only tokenises does not need it."""
    from importlib import import_module

    modules = {"TokenBatch": "batch", "RankLoader": "loader", "StepBatch": "loader"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
