"""python -m muster.trainer.programs.prepare

Fills a worker's disk before its program starts: the source, the inputs, and the newest checkpoint that verifies. What
lies where is written to prepared.json, for the launcher. May run again: it begins anew.

A checkpoint is put back by its own name into the folder that the program writes its checkpoints to, where programs that
know nothing of Muster look for it; MUSTER_RESUME_DIR leads there. All workers of a gang resume from one step: worker 0
chooses, and the others take that step or none.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.storage.errors import NotFound, StorageError
from muster.storage.listing import steps_in
from muster.storage.opening import open_source, open_store
from muster.storage.readers import reading
from muster.storage.small_files import write_whole
from muster.storage.store import Store
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.failures import CheckpointError, DamagedCommit, GoneCommit
from muster.trainer.checkpoint.folder_files import write_folder
from muster.trainer.checkpoint.quarantine import first_good, put_back_newest, set_aside
from muster.trainer.errors import UserError
from muster.trainer.programs import INPUTS, KEEPING, SOURCE, WORK, WorkerOrders, read_surroundings
from muster.trainer.programs.archive import unpack
from muster.trainer.programs.hub_links import link_repositories
from muster.words.address import StorageAddress, parse_address
from muster.words.checkpoint import RESUME, Commit
from muster.words.names import PREPARED, Env, ExitCode
from muster.words.program import Input

SOURCE_BYTES_MAX: Final = 1 << 30
BLOCK_BYTES: Final = 16 << 20
# For worker 0 to fetch and verify the checkpoint: 500 GB of a slow store. It fails sooner where its node is gone.
CHOICE_SECONDS_MAX: Final = 3600.0
CHOICE_PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class ResumedCheckpoint:
    """The checkpoint that was put back: its step, its name among the program's checkpoints, its folder, and the tokens
    that were trained until then."""

    step: int
    entry: str | None
    folder: Path
    tokens: int


def prepare(around: WorkerOrders, report: Callable[[str], None]) -> dict[str, object]:
    """Fetch everything, and return what prepared.json says. Raises UserError, StorageError, OSError."""
    for name in (SOURCE, WORK, INPUTS, KEEPING):
        shutil.rmtree(around.worker_dir / name, ignore_errors=True)
    if around.watched.is_relative_to(around.worker_dir):  # else it is the user's to empty
        shutil.rmtree(around.watched, ignore_errors=True)
    (around.worker_dir / KEEPING).mkdir(parents=True)
    work = around.worker_dir / WORK
    source = inputs = None
    _link_downloads(report)
    if around.program.source:
        source = around.worker_dir / SOURCE
        _fetch_source(str(around.program.source), around.worker_dir / KEEPING / "source.tar.gz", source)
        shutil.copytree(source, work, symlinks=True)
        report(f"the source lies in {source}")
    work.mkdir(exist_ok=True)
    around.watched.mkdir(parents=True, exist_ok=True)
    if around.program.inputs:
        inputs = around.worker_dir / INPUTS
        inputs.mkdir()
        for name, asked in around.program.inputs.items():
            report(f"input {name}: {_fetch_input(name, asked, inputs / name)}")
    resumed = _resume(around, report) if around.resume_step else None
    document: dict[str, object] = {
        "workDir": str(work),
        "sourceDir": str(source) if source else None,
        "inputsDir": str(inputs) if inputs else None,
        "checkpointDir": str(around.watched),
        "resumeDir": str(resumed.folder) if resumed else None,
        "resumeStep": resumed.step if resumed else 0,
        "resumeTokens": resumed.tokens if resumed else 0,
    }
    if resumed is not None:
        document["entry"] = resumed.entry
    write_whole(around.worker_dir / PREPARED, json.dumps(document))
    return document


def _link_downloads(report: Callable[[str], None]) -> None:
    """Give the program what this machine has downloaded from the hub already. Without it, it downloads it again.
    A job that names an HF_HOME of its own has what is there."""
    machine, own = os.environ.get(Env.HUB_CACHE), os.environ.get("HF_HOME")
    if not machine or not own or not Path(own).is_relative_to(os.environ.get(Env.CACHE_DIR) or own + "/"):
        return
    try:
        count = link_repositories(Path(machine), Path(own) / "hub")
    except OSError as error:
        report(f"{machine}: its models can't be linked, and are downloaded again: {error}")
    else:
        if count:
            plural = "y" if count == 1 else "ies"
            report(f"{count} repositor{plural} of the hub in {own}, as links to {machine}")


def _fetch_source(address: str, archive: Path, folder: Path) -> None:
    place = parse_address(address)
    parent, _, name = str(place).rpartition("/")
    store = open_source(parse_address(parent))
    try:
        about = store.about(name)
        if about.bytes > SOURCE_BYTES_MAX:
            raise UserError(f"program.source {address}: has {about.bytes:,} bytes; put data into a store instead")
        with store.open(about) as read, open(archive, "wb") as written:
            shutil.copyfileobj(read, written, BLOCK_BYTES)
    except NotFound:
        raise UserError(f"program.source {address}: there is no such archive; submit the job again") from None
    unpack(archive, folder, f"program.source {address}")
    archive.unlink()


# --- inputs ---


def _fetch_input(name: str, asked: Input, folder: Path) -> str:
    """Fetch an input, and say what it is."""
    if asked.source is not None:
        try:
            count = _fetch_model(str(asked.source), folder)
        except NotFound as error:
            raise UserError(f"program.inputs.{name}: {error}") from None
        return f"{count} files of {asked.source}"
    if asked.uri is None:
        raise UserError(
            f"program.inputs.{name}.job {asked.job!r} was not resolved to a checkpoint folder: submit through the "
            "API, or give uri"
        )
    from muster.trainer.convert.export import export  # for a model of Muster's trainer alone needs its libraries

    try:
        report = export(open_store(asked.uri, links=False), asked.step, folder)
    except (DamagedCommit, GoneCommit) as error:  # it will be no other in the next attempt
        job = "" if asked.job is None else f" of job {asked.job}"
        raise UserError(
            f"program.inputs.{name}: the checkpoint of step {asked.step}{job} can't be read: {error}. Submit the job "
            f"again with another step; muster checkpoints ls {asked.job or asked.uri} lists them"
        ) from error
    return f"step {report['step']} of {asked.uri}"


def _fetch_model(source: str, folder: Path) -> int:
    address = parse_address(source)
    if address.scheme == "hf":
        return _fetch_from_hub(source, address, folder)
    store, count = open_source(address), 0
    for about in list(store.objects("")):
        if ".." in about.key.split("/") or about.key.startswith("/"):
            raise UserError(f"{source}: {about.key[:200]!r} is no path below the folder")
        target = folder / about.key
        target.parent.mkdir(parents=True, exist_ok=True)
        with store.open(about) as read, open(target, "wb") as written:
            shutil.copyfileobj(read, written, BLOCK_BYTES)
        count += 1
    if not count:
        raise NotFound(f"{source}: holds no files")
    return count


def _fetch_from_hub(source: str, address: StorageAddress, folder: Path) -> int:
    from muster.trainer.models.files import open_files
    from muster.words.address import hub_path

    where = hub_path(address)
    files = open_files(source)  # says what is wrong with the name, the token or the network
    from huggingface_hub import snapshot_download

    revision = getattr(files, "revision", None) or where.revision
    patterns = [f"{where.path.strip('/')}/*"] if where.path else None
    copy = Path(snapshot_download(where.repository, revision=revision, allow_patterns=patterns))
    shutil.copytree(copy / where.path.strip("/") if where.path else copy, folder)
    return sum(path.is_file() for path in folder.rglob("*"))


# --- the checkpoint to resume from ---


def _resume(around: WorkerOrders, report: Callable[[str], None]) -> ResumedCheckpoint | None:
    store = open_store(around.store)
    choice = f"{RESUME}/attempt-{around.attempt}.json"
    if around.worker > 0:
        return _take(around, store, _chosen(store, choice), report)
    put_back_newest(store, report)
    steps = [step for step in reversed(steps_in(store)) if step <= around.resume_step]
    resumed = first_good(store, steps, around.resume_step, lambda step: _fetch(around, store, step), report)
    if resumed.step < around.resume_step:
        report(f"resumes from step {resumed.step}, for step {around.resume_step} can't be used")
    if around.workers > 1:
        for old in list(store.objects(f"{RESUME}/")):
            store.delete(old.key)
        store.replace(choice, json.dumps({"step": resumed.step}).encode())
    report(f"step {resumed.step} lies in {resumed.folder}: resumes by the program; data position not checked")
    return resumed


def _chosen(store: Store, key: str) -> int:
    """The step that worker 0 has fetched and verified. Raises CheckpointError where it says none in time."""
    deadline = time.monotonic() + CHOICE_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            return int(json.loads(store.read(key))["step"])
        except NotFound:
            time.sleep(CHOICE_PAUSE_SECONDS)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{store.uri}/{key}: can't be read: {error}") from error
    raise CheckpointError(f"{store.uri}/{key}: worker 0 has not said which checkpoint to resume from; see its log")


def _take(around: WorkerOrders, store: Store, step: int, report: Callable[[str], None]) -> ResumedCheckpoint:
    try:
        return _fetch(around, store, step)
    except DamagedCommit as damaged:  # worker 0 resumes from it: this attempt can't, and the next takes another
        set_aside(store, step, damaged, report)
        raise


def _fetch(around: WorkerOrders, store: Store, step: int) -> ResumedCheckpoint:
    """Write the checkpoint into the watched folder, whole or not at all."""
    commit = commit_in(store, step, own=True)
    if commit.kind != "folder":
        raise UserError(
            f"{store.uri}: step {step} is a checkpoint of Muster's own trainer, and this job runs a program; give it a "
            "checkpoint.uri of its own"
        )
    fetched = around.worker_dir / KEEPING / "fetched"
    shutil.rmtree(fetched, ignore_errors=True)
    try:
        with reading(store, step):
            write_folder(store, commit, fetched)
        return ResumedCheckpoint(step, commit.entry, _moved(fetched, around.watched, commit), commit.tokens)
    finally:
        shutil.rmtree(fetched, ignore_errors=True)


def _moved(fetched: Path, watched: Path, commit: Commit) -> Path:
    """Move the files to where the program looks for them, in place of what its source brought."""
    places = {fetched: watched / commit.entry} if commit.entry is not None else {}
    for source, place in (places or {path: watched / path.name for path in fetched.iterdir()}).items():
        shutil.rmtree(place, ignore_errors=True)
        shutil.move(source, place)
    return watched if commit.entry is None else watched / commit.entry


def main() -> int:
    def report(words: str) -> None:
        print(f"prepare: {words}", file=sys.stderr, flush=True)

    try:
        prepare(read_surroundings(), report)
    except UserError as error:
        report(str(error))
        return int(ExitCode.USER_ERROR)
    except StorageError as error:
        report(str(error))
        return int(ExitCode.STORAGE)
    except OSError as error:
        full = "; the node's disk is full: give the workers more" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        report(f"{error.filename or os.getcwd()}: {error.strerror or error}{full}")
        return int(ExitCode.STORAGE)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
