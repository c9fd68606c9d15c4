"""Keeps with the job what became of its data."""

from __future__ import annotations

from muster.storage.opening import open_store
from muster.trainer.data import RunData, Tokenizer
from muster.trainer.data.report import data_report, first_samples, shown_sample
from muster.trainer.errors import StorageError
from muster.trainer.train.records import say
from muster.words.data_report import DATA_REPORT_KEY, SHOWN_SAMPLES, DataReport


def full_report(data: RunData, tokenizer: Tokenizer) -> DataReport:
    """Return the report with the first samples as the model sees them."""
    examples = tuple(map(shown_sample, first_samples(data, tokenizer, SHOWN_SAMPLES)))
    return data_report(data, tokenizer).model_copy(update={"shown": examples})


def keep_report(folder: str, data: RunData, tokenizer: Tokenizer) -> None:
    """Write the report into the job's checkpoint folder. A store that fails now does not stop the job: it has nothing
    to lose yet, and is asked again at the first commit."""
    document = full_report(data, tokenizer).model_dump_json(by_alias=True, indent=1)
    try:
        open_store(folder).replace(DATA_REPORT_KEY, document.encode())
    except StorageError as error:
        say(f"data: warning: the report of the data could not be kept: {error}")
