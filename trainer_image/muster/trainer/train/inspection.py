"""python -m muster.trainer.train.inspection (--job | ADDRESS) [--model ADDRESS] [--tokenizer ADDRESS]
[--sequence-length N] [--format NAME] [--field NAME] [--columns OURS=THEIRS,…] [--chat-template ADDRESS]
[--samples N] [--no-color] [--json]

Prepares data as a job would, by the same code, and says what it found: counts, lengths, what is left out and why, and
samples as the model sees them. With --job, standard input holds a job's `spec.training` as JSON; else ADDRESS is a
file, folder or glob. What is prepared lies in $MUSTER_CACHE_DIR, where a job finds it again, or is removed. Exit code
0; 80 where a job would refuse the data, with file and line of up to 20 faults; 83 where storage fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.recipe.data_config import DataConfig, Source
from muster.recipe.data_formats import FORMATS
from muster.recipe.training import TrainingConfig
from muster.storage.data_format import of_known_format
from muster.storage.records import RawRecord
from muster.storage.sources import find
from muster.trainer.arguments import ArgumentParser
from muster.trainer.data import Tokenizer, load_tokenizer, open_data, templated
from muster.trainer.data.checks import must_have_samples
from muster.trainer.data.documents import RecordReader
from muster.trainer.data.prepare import with_formats
from muster.trainer.data.reading import FileReading
from muster.trainer.data.rendering import RenderedSample
from muster.trainer.data.report import first_samples
from muster.trainer.errors import StorageError, UserError, exit_code
from muster.trainer.train.data_report import full_report
from muster.trainer.train.origin import as_packable, fresh_origin
from muster.trainer.verify.references import ReferenceColumns, evaluated_sources
from muster.words.base import InvalidDocument, dump, parse
from muster.words.data_report import DataReport, report_lines
from muster.words.names import Env
from muster.words.redaction import redact
from muster.words.shown_samples import sample_text
from muster.words.text import with_codes

FAULTS_MAX = 20
BARE_SHAPE = {"dim": 16, "layers": 1, "heads": 1, "kvHeads": 1, "ffnDim": 16}  # of a file without a model: never built


@dataclass(frozen=True)
class InspectedData:
    """The report of some data, and its first samples."""

    report: DataReport
    samples: tuple[RenderedSample, ...]

    def document(self) -> dict[str, Any]:
        return dump(self.report) | {"samples": [asdict(sample) for sample in self.samples]}


def inspect(config: TrainingConfig, tokenizer: Tokenizer, cache: Path, samples: int) -> InspectedData:
    """Prepare the data as the job would. Raises UserError that names every fault's place, up to FAULTS_MAX of them."""
    try:
        data = open_data(config, tokenizer, cache, _say)
        must_have_samples(config, data)
    except UserError as error:
        faults = list(_faults(config, tokenizer))
        if len(faults) > 1:
            more = f"{len(faults)} faults" if len(faults) < FAULTS_MAX else f"the first {FAULTS_MAX} faults"
            raise UserError(f"{more}:\n" + "\n".join(f"  {fault}" for fault in faults)) from None
        raise error from None
    return InspectedData(full_report(data, tokenizer), tuple(first_samples(data, tokenizer, samples)))


def _faults(config: TrainingConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the faults of records of any source, each with its place; none where something else is wrong."""
    faults = list[str]()
    try:
        with_format = with_formats(config, _discard)
        rewarded = ReferenceColumns(with_format.grpo.verifiers) if with_format.grpo else None
        sources: list[tuple[Source, ReferenceColumns | None]] = [
            (source, rewarded) for source in with_format.data.train
        ]
        sources += evaluated_sources(with_format.evaluation) if with_format.evaluation else ()
        for source, references in sources:
            _, files = of_known_format(source, find(source.source, source.format))
            for file in files:
                records = RecordReader(source, tokenizer, config.data.train_on, None, references, faults)
                try:
                    for unit in FileReading(file).units(source, tokenizer):
                        if isinstance(unit, RawRecord):
                            deque(records.chunks([unit]), maxlen=0)  # for its faults alone
                        if len(faults) >= FAULTS_MAX:
                            return
                except UserError as error:  # of the file, whose records can't be read further
                    faults.append(str(error))
    except (UserError, StorageError):
        pass
    finally:
        yield from faults[:FAULTS_MAX]


def of_job(document: object) -> tuple[TrainingConfig, Tokenizer]:
    """A job's configuration, and the tokenizer that its model brings. Raises UserError, StorageError."""
    try:
        config = parse(TrainingConfig, document, "training")
    except InvalidDocument as error:
        raise UserError(str(error)) from None
    origin = fresh_origin(config)
    return as_packable(config, origin, _say), origin.tokenizer


def of_file(chosen: argparse.Namespace) -> tuple[TrainingConfig, Tokenizer]:
    """A configuration around one source, for the first task that reads its format. Raises UserError, StorageError."""
    source: dict[str, Any] = {"source": chosen.address, "format": chosen.format, "field": chosen.field}
    if chosen.columns:
        source["columns"] = dict(pair.partition("=")[::2] for pair in chosen.columns.split(","))
    try:
        data_source, _ = of_known_format(parse(Source, source, "source"), find(chosen.address, chosen.format))
        data: dict[str, Any] = {"train": [dump(data_source)], "sequenceLength": chosen.sequence_length}
        if chosen.tokenizer is not None:
            data["tokenizer"] = chosen.tokenizer
        if chosen.chat_template is not None:
            data["chatTemplate"] = chosen.chat_template
        if chosen.chat_template_name is not None:
            data["chatTemplateName"] = chosen.chat_template_name
        task = next(task for task, formats in FORMATS.items() if data_source.format in formats)
        around: dict[str, Any] = {"batch": {"tokensPerStep": chosen.sequence_length}, "length": {"epochs": 1}}
        evaluation = tuple(_held_out(address, chosen, task) for address in chosen.evaluation)
        if evaluation:
            around["evaluation"] = {"every": 1, "data": [dump(each) for each in evaluation]}
            data["curation"] = {"decontamination": {}}  # what leaks is counted, with examples, as what it drops
        if chosen.model is not None:
            return of_job({"task": task, "data": data, "model": {"source": chosen.model}, **around})
        tokenizer = templated(load_tokenizer(chosen.tokenizer or "bytes"), parse(DataConfig, data, "data"))
        shape = BARE_SHAPE | {"vocabSize": tokenizer.vocab_size, "maxPositions": chosen.sequence_length}
        # As text first: what a task asks of its model is no matter here, where none is trained.
        text = {**data, "train": [{"source": chosen.address}]}
        if evaluation:
            around["evaluation"] = {"every": 1, "data": [{"source": address} for address in chosen.evaluation]}
        config = parse(TrainingConfig, {"model": {"architecture": shape}, "data": text, **around}, "training")
        updates: dict[str, Any] = {"data": config.data.model_copy(update={"train": (data_source,)})}
        if config.evaluation is not None:
            updates["evaluation"] = config.evaluation.model_copy(update={"data": evaluation})
        return config.model_copy(update={"task": task, **updates}), tokenizer
    except InvalidDocument as error:
        raise UserError(str(error)) from None


def _held_out(address: str, chosen: argparse.Namespace, task: str) -> Source:
    """A source to evaluate on beside a file. Raises UserError where the file's task does not read its format."""
    source = parse(Source, {"source": address, "format": "auto", "field": chosen.field}, "evaluation")
    data_source, _ = of_known_format(source, find(address, "auto"), task)
    if data_source.format not in FORMATS[task]:
        raise UserError(
            f"--evaluation {address} is {data_source.format}, and {chosen.address} is for task {task}, which reads "
            f"{', '.join(FORMATS[task])}; give data of one of these, or a job's file, which says all"
        )
    return data_source


def words(inspected: InspectedData, colour: bool) -> str:
    """The report for people."""
    parts = [with_codes(line) for line in report_lines(inspected.report)]  # some quote the data
    for number, sample in enumerate(inspected.samples):
        parts += ["", sample_text(number, sample, colour)]
    return "\n".join(parts)


def _say(line: str) -> None:
    print(with_codes(redact(line)), file=sys.stderr, flush=True)


def _discard(line: str) -> None:
    """It has been said."""


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m muster.trainer.train.inspection", description=__doc__)
    parser.add_argument("address", nargs="?", help="a file, a folder, a glob, or an s3:// or https:// address")
    parser.add_argument("--job", action="store_true", help="read spec.training as JSON from standard input")
    parser.add_argument("--model", help="address of a model's folder, whose tokenizer and chat template are taken")
    parser.add_argument("--tokenizer", help="`bytes` (default) or the address of a tokenizer.json")
    parser.add_argument("--chat-template", help="address of a Jinja file")
    parser.add_argument("--chat-template-name", help="one of several templates that the tokenizer brings")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--format", default="auto")
    parser.add_argument("--field", default="text")
    parser.add_argument("--columns", default="")
    parser.add_argument("--evaluation", action="append", default=[], help="address of held-out data: leaks are counted")
    parser.add_argument("--samples", type=int, default=0, help="show so many samples as the model sees them")
    parser.add_argument("--no-color", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    try:
        chosen = parser.parse_args(arguments)
        if chosen.job is (chosen.address is not None):
            parser.error("give --job or an address")
        kept = os.environ.get(Env.CACHE_DIR)
        with nullcontext(kept) if kept else tempfile.TemporaryDirectory(prefix="muster-data-") as cache:
            config, tokenizer = of_job(json.load(sys.stdin)) if chosen.job else of_file(chosen)
            inspected = inspect(config, tokenizer, Path(cache), chosen.samples)
    except Exception as error:
        code = exit_code(error)
        if code == 1:
            raise
        said = redact(str(error))
        print(json.dumps({"error": said}) if "--json" in arguments else f"error: {with_codes(said)}", file=sys.stderr)
        return code
    colour = sys.stdout.isatty() and not chosen.no_color and not os.environ.get("NO_COLOR")
    print(json.dumps(inspected.document()) if chosen.json else words(inspected, colour))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
