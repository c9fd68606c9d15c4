"""Data: text becomes token stores, stores become samples in an order that only (seed, epoch, sample) decide."""

from muster.trainer.data.batch import Batch
from muster.trainer.data.chat import chat_prompt
from muster.trainer.data.dataset import Data, Dataset, open_data
from muster.trainer.data.loader import Loader, StepBatch
from muster.trainer.data.packing import IGNORED, PADDING, Sample
from muster.trainer.data.tokenizer import (
    Tokenizer,
    add_tokens,
    load_tokenizer,
    templated,
    tokenizer_from_commit,
    tokenizer_of_folder,
)

__all__ = [
    "IGNORED",
    "PADDING",
    "Batch",
    "Data",
    "Dataset",
    "Loader",
    "Sample",
    "StepBatch",
    "Tokenizer",
    "add_tokens",
    "chat_prompt",
    "load_tokenizer",
    "open_data",
    "templated",
    "tokenizer_from_commit",
    "tokenizer_of_folder",
]
