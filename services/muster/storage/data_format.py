"""Detection of a source's format from its files, and the message for a record of another format."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from muster.recipe.data_config import Source
from muster.recipe.data_formats import SHAPES, columns_of, fits_task, looks_like, shapes_of
from muster.storage.file_beginnings import begins_as_json, may_be_stand_in, refuse_stand_in
from muster.storage.records import Record, read_records
from muster.storage.sources import SourceFile, ending, is_glob, is_of_records, split_of
from muster.words.base import UserError
from muster.words.redaction import redact

# What lies beside the records in the folders that data sets are published as, and is none of them.
# Of small files, and of those without an ending of records: a folder of texts may have a million of both.
FILES_LOOKED_AT = 16
_ABOUT = ("readme", "license", "licence", "dataset_info", "dataset_infos", "dataset_dict", "state")


class UnknownColumns(UserError):
    """The records have columns that no format has. `suggested` are the source's format and columns, by their names."""

    def __init__(self, words: str, source: Source, suggested: Mapping[str, Any]) -> None:
        self.suggested = suggested
        super().__init__(f"{words}. {_advice(redact(source.source), suggested)}")


def _advice(address: str, suggested: Mapping[str, Any]) -> str:
    if not suggested:
        return (
            "Say which they are: `format: jsonl` with `field` for a column of text, or the `format` of conversations "
            "with `columns`"
        )
    parts: dict[str, Any] = {"source": address, **suggested}
    if columns := suggested.get("columns"):
        parts["columns"] = f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in columns.items())}}}"
    return f"Write the source as {{{', '.join(f'{key}: {value}' for key, value in parts.items())}}}"


def of_known_format(
    source: Source, files: Sequence[SourceFile], task: str | None = None
) -> tuple[Source, tuple[SourceFile, ...]]:
    """The source with its format, and those of its files that are of it. Where records have the columns of several
    formats, the task decides.

    A format that was given is believed. Raises UserError if `auto` can't determine it, and where the files are of
    several parts of a data set, StorageError where a file can't be read.
    """
    telling = tuple(file for file in files if not _is_about(file)) or tuple(files)
    text = source.format == "text"
    for file in itertools.islice((file for file in telling if may_be_stand_in(file, text)), FILES_LOOKED_AT):
        refuse_stand_in(file, text)
    if source.format != "text" and not is_glob(source.source):
        _refuse_splits(source, telling)
    if source.format != "auto":
        return source, tuple(files) if source.format == "text" else telling
    if source.source.startswith("builtin://"):
        return source.model_copy(update={"format": "text"}), tuple(files)
    records = [file for file in telling if is_of_records(file.address)]
    texts = [file for file in telling if not is_of_records(file.address)]
    lines = [file for file in texts[:FILES_LOOKED_AT] if begins_as_json(file)]
    if lines and not records and len(lines) == len(texts) and all(ending(file) == "" for file in lines):
        records, texts = lines, []
    elif lines:
        raise UserError(
            f"{lines[0].address}: begins as records in JSON, and its ending does not say so; name the source's "
            "`format` (text reads it as it stands), or call the file .jsonl or .json"
        )
    if records and texts:
        raise UserError(
            f"data source {redact(source.source)}: holds records ({records[0].address}) and other files "
            f"({texts[0].address}); name the source's `format` (text reads every file as a document), or choose the "
            "files with a glob"
        )
    if texts:
        return source.model_copy(update={"format": "text"}), tuple(texts)
    first = _first(records, source)
    if first is None:
        raise UserError(f"data source {redact(source.source)}: has nothing to train on: all its files are empty")
    looks = looks_like(first.value, source.field, task)
    if looks is None:
        words = f"{first.place}: has columns that no format has: {columns_of(first.value)}"
        raise UnknownColumns(words, source, _suggested(first, task))
    return source.model_copy(update={"format": looks}), tuple(records)


# Names that data sets have for what Muster calls prompt and completion, the most telling first.
_PROMPTS = ("prompt", "question", "instruction", "query", "input", "user", "human")
_COMPLETIONS = ("completion", "answer", "response", "output", "reply", "target", "assistant")
_TEXTS = ("text", "content", "document", "body", "article")


def _suggested(first: Record, task: str | None) -> dict[str, Any]:
    """Return format and columns of a source whose columns' names tell their meaning; else nothing."""
    names = {str(name).lower(): str(name) for name in first.value} if isinstance(first.value, Mapping) else {}
    asked, answered, text = (
        next((names[word] for word in words if word in names), None) for words in (_PROMPTS, _COMPLETIONS, _TEXTS)
    )
    if asked and answered and fits_task("prompt-completion", task or "sft"):
        return {"format": "prompt-completion", "columns": {"prompt": asked, "completion": answered}}
    if text and fits_task("jsonl", task or "pretrain"):
        return {"format": "jsonl", "field": text}
    return {}


def _refuse_splits(source: Source, files: Sequence[SourceFile]) -> None:
    """Refuse a folder that holds both training and test splits, so that tests are not trained on by accident."""
    splits = dict(filter(None, map(split_of, reversed([file for file in files if is_of_records(file.address)]))))
    if len(splits) > 1:
        named = " or ".join(splits[split] for split in sorted(splits, reverse=True))
        problem = f"holds several parts of a data set ({', '.join(sorted(splits))}), which would all be learnt from"
        raise UserError(f"data source {redact(source.source)}: {problem}; name one of them: {named}")


def _is_about(file: SourceFile) -> bool:
    name = file.address.rpartition("/")[2].lower()
    return name.partition(".")[0] in _ABOUT and not name.endswith((".jsonl", ".parquet", ".arrow", ".csv"))


def _first(files: Sequence[SourceFile], source: Source) -> Record | None:
    for file in files:
        records = read_records(file, renamed_columns(source))
        try:
            for record in records:
                return record
        finally:
            records.close()
    return None


def renamed_columns(source: Source) -> dict[str, str]:
    """The format's name of each column that is called otherwise in the files of this source."""
    return source.columns.renamed() if source.columns else {}


def of_another_format(record: Any, source: Source) -> str:
    """A hint that ends a message about a record that is not of its source's format; empty where there is none."""
    shapes = shapes_of(record, source.field)
    if not shapes or source.format in shapes:
        return ""
    return f". It looks like {shapes[0]}: {SHAPES.get(shapes[0], 'a column of text')}; set the source's `format`"
