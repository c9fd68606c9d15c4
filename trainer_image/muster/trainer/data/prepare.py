"""Makes a token store, once per content: locked against a second starter, gone on with after a kill, published by one
rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from muster.recipe.data_config import Source
from muster.recipe.data_formats import CONVERSATIONS, fits_task, wrong_format
from muster.recipe.training import TrainingConfig
from muster.storage import sources
from muster.storage.data_format import of_known_format
from muster.storage.sources import SourceFile
from muster.trainer.data.build import StoreBuilder
from muster.trainer.data.encode import EncodingWork
from muster.trainer.data.lock import locked
from muster.trainer.data.rules import NO_RULES, TextRules
from muster.trainer.data.store import FORMAT_VERSION, WRITING_VERSION, TokenStore, sync
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.errors import StorageError, UserError, final_errors_are_the_users
from muster.trainer.verify.references import ReferenceColumns

Report = Callable[[str], None]

TRUST_STAMP_BYTES = 1 << 20  # below this, reading a file again is cheaper than remembering it
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})


@final_errors_are_the_users()
def prepared(
    source: Source,
    tokenizer: Tokenizer,
    cache: Path,
    report: Report,
    train_on: str = "assistant",
    rules: TextRules = NO_RULES,
    references: ReferenceColumns | None = None,
) -> TokenStore:
    """The token store of a source, made now if there is none. Blocks while another process makes it. `rules` say what
    becomes of a document by its text, and `references` what is kept of its record for verifiers.

    Raises UserError for bad input or a cache that can't be written, StorageError when the disk is full or fails.
    """
    try:
        return _prepared(source, tokenizer, cache, report, train_on, rules, references)
    except OSError as error:
        raise _disk_error(cache, error) from error


def _prepared(
    source: Source,
    tokenizer: Tokenizer,
    cache: Path,
    report: Report,
    train_on: str,
    rules: TextRules,
    references: ReferenceColumns | None,
) -> TokenStore:
    source, _ = _resolve_source(source, report)
    recipe = {
        "version": FORMAT_VERSION,
        **({"writing": WRITING_VERSION} if source.format not in ("text", "jsonl") else {}),
        "format": source.format,
        "field": source.field if source.format == "jsonl" else None,
        "tokenizer": _digest_of(tokenizer.describe()),
        **({"trainOn": train_on} if source.format in CONVERSATIONS and train_on != "assistant" else {}),
        **({"columns": source.columns.renamed()} if source.columns else {}),
        **rules.recipe(),
        **(references.recipe() if references else {}),
    }
    for place in ("tokens", "locks", "digests"):
        (cache / place).mkdir(parents=True, exist_ok=True)
    name = _digest_of({"source": source.source, **recipe})[:32]
    with locked(cache / "locks" / name, source.source, report) as say:
        _, files = _resolve_source(source, say)
        digests = [_remembered_digest(file, cache / "digests") for file in files]
        key = _digest_of({"contents": sorted(digests), **recipe})
        order = _digest_of(digests)[:8]  # what was done of the files is that of these files in this order
        folder = cache / "tokens" / key
        building = cache / "tokens" / f".building-{name}-{key[:32]}-{order}"
        store = TokenStore.open(folder)
        for left in cache.glob(f"tokens/.building-{name}-*"):  # of a starter that died; of these contents it is gone on
            if store is not None or left != building:
                shutil.rmtree(left, ignore_errors=True)
        if store is None:
            try:
                StoreBuilder(building, EncodingWork(source, tokenizer, train_on, rules, references), key, say).build(
                    files, digests
                )
            except (
                UserError,
                OSError,
            ):  # it would be the same again, or there is no room; any other may be gone on from
                shutil.rmtree(building, ignore_errors=True)
                raise
            _publish(building, folder)
            store = TokenStore.open(folder)
    if store is None:
        raise StorageError(f"the token store {folder} vanished while it was being opened; start again")
    return store


@final_errors_are_the_users()
def with_formats(config: TrainingConfig, report: Report) -> TrainingConfig:
    """The configuration with the format of each source that is to be found by looking. Raises UserError for one that
    the task can't learn from, StorageError where a source can't be read."""
    by_source = {source: _source_with_format(source, config.task, report) for _, source in config.sources()}
    changes: dict[str, object] = {}
    data = {"train": tuple(by_source[source] for source in config.data.train)}
    changes["data"] = config.data.model_copy(update=data)
    if config.evaluation is not None:
        evaluation = config.evaluation
        sets = {
            name: each.model_copy(update={"data": tuple(by_source[source] for source in each.data)})
            for name, each in evaluation.sets.items()
        }
        apart = {"data": tuple(by_source[source] for source in evaluation.data), "sets": sets}
        changes["evaluation"] = evaluation.model_copy(update=apart)
    return config.model_copy(update=changes)


def _source_with_format(source: Source, task: str, report: Report) -> Source:
    if source.format != "auto":
        return source
    with_format, _ = _resolve_source(source, report, task)
    if not fits_task(with_format.format, task):
        raise UserError(
            f"data source {source.source}: {wrong_format(with_format.format, task)}, and its files look like that"
        )
    report(f"data: {source.source} is in format {with_format.format}, as its files look")
    return with_format


def _resolve_source(source: Source, report: Report, task: str | None = None) -> tuple[Source, tuple[SourceFile, ...]]:
    return of_known_format(source, sources.find(source.source, source.format, report), task)


def _digest_of(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _remembered_digest(file: SourceFile, folder: Path) -> str:
    """Return `sources.digest` of a file. A large file is read only once, because its size, inode and times show whether
    it is unchanged."""
    if file.size < TRUST_STAMP_BYTES or isinstance(file, sources.StoredFile):
        return sources.digest(file)
    memory = folder / hashlib.sha256(file.address.encode()).hexdigest()[:40]
    with contextlib.suppress(OSError, ValueError):
        stamp, digest = memory.read_text().split()
        if stamp == file.stamp:
            return digest
    digest = sources.digest(file)
    beside = memory.with_name(f"{memory.name}.{uuid.uuid4().hex}")
    beside.write_text(f"{file.stamp} {digest}\n")
    beside.replace(memory)
    return digest


def _publish(building: Path, folder: Path) -> None:
    """One rename makes the store exist. Whoever published the same content first wins; a damaged folder is replaced."""
    if folder.exists() and TokenStore.open(folder) is None:
        shutil.rmtree(folder)
    try:
        building.rename(folder)
    except OSError:
        if TokenStore.open(folder) is None:
            raise
        shutil.rmtree(building, ignore_errors=True)
    sync(folder.parent)


def _disk_error(cache: Path, error: OSError) -> StorageError | UserError:
    if error.errno in NO_ROOM:
        return StorageError(
            f"no room for the token store in {cache}: {error.strerror}. What was written has been removed; free some "
            "space, or set MUSTER_CACHE_DIR to a larger disk"
        )
    if error.errno in NOT_WRITABLE:
        return UserError(f"can't write token stores to {cache}: {error}; set MUSTER_CACHE_DIR to a writable folder")
    return StorageError(f"preparing data in {cache} failed: {error}")
