"""python -m tests.drills.programs.kills [--kills 200] [--seed 1]

SIGKILLs at random moments of a program's folder checkpoints: of the program, of its keeper, or of both at once. After
each, every published checkpoint is loaded as a fresh process would, and the next attempt resumes by `prepare`. What is
loaded must be what the program wrote at that step, whole: all its files hold the step's own bytes.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.programs.gang_of_keepers import surroundings

from muster.storage.file_store import FileStore
from muster.storage.listing import steps_in
from muster.storage.opening import open_store
from muster.storage.small_files import write_whole
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.folder_files import write_folder
from muster.trainer.programs import WorkerOrders
from muster.trainer.programs.keeper import FolderKeeper
from muster.trainer.programs.prepare import prepare
from muster.words.names import PROGRESS

FILES, SIZE_MAX, SECONDS_MAX = 6, 200_000, 1.2
fork = multiprocessing.get_context("fork")  # a process that begins anew takes a second to import


@dataclass
class Tally:
    """Counts over all kills."""

    kills: int = 0
    published: set[int] = field(default_factory=set)
    resumed: list[int] = field(default_factory=list)
    loaded: int = 0  # how often a checkpoint was loaded and compared


def contents(step: int) -> dict[str, bytes]:
    """The files of a checkpoint. No two steps share a byte's value at the same place for long."""
    draw = random.Random(step)
    sizes = [draw.randrange(SIZE_MAX) for _ in range(FILES)]
    return {f"part-{number}/state.bin": draw.randbytes(8) * (size // 8 + 1) for number, size in enumerate(sizes)}


def program(around: WorkerOrders, first: int) -> None:
    """Train: save each step in one of three ways, and delete what is older than two of them."""
    for step in range(first + 1, first + 10_000):
        in_place = step % 3 == 0
        folder = around.watched / (f"step-{step}" if in_place else f".step-{step}")
        for path, data in contents(step).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        if in_place:
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        else:
            folder.rename(around.watched / f"step-{step}")
        report = {"step": step, "progressedAt": time.time(), "pid": os.getpid()}
        write_whole(around.worker_dir / PROGRESS.format(rank=0), json.dumps(report))
        if step % 3 == 1:  # the upload may be under way
            shutil.rmtree(around.watched / f"step-{step - 2}", ignore_errors=True)
        time.sleep(0.01)  # not a wait: a step takes so long


def keep(around: WorkerOrders) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    keeper = FolderKeeper(around, open_store(around.store))
    keeper.begin()
    keeper.run()


def expect_whole(found: Path, step: int) -> None:
    """Raises AssertionError where a checkpoint's folder is not what the program wrote at that step."""
    files = {path.relative_to(found).as_posix(): path.read_bytes() for path in found.rglob("*") if path.is_file()}
    files.pop("trainer_state.json", None)
    assert files == contents(step), f"the checkpoint of step {step} is torn: {sorted(files)}"


def load_all(store: FileStore, seen: Tally, into: Path) -> None:
    for step in steps_in(store):
        seen.published.add(step)
        write_folder(store, commit_in(store, step, own=True), into)
        expect_whole(into, step)
        shutil.rmtree(into)
        seen.loaded += 1


def kill_many(root: Path, kills: int, seed: int) -> Tally:
    """Run and kill so many attempts below `root`. Raises AssertionError for the first torn checkpoint."""
    draw, seen = random.Random(seed), Tally()
    fence, store = root / "status.json", FileStore(root / "store" / "uid")
    for attempt in range(1, kills + 1):
        newest = max(steps_in(store), default=0)
        fence.write_text(json.dumps({"metadata": {"uid": "uid"}, "status": {"attempt": attempt}}))
        around = surroundings(root, attempt=str(attempt), resume_step=str(newest), fence=fence.as_uri())
        prepared = prepare(around, lambda words: None)
        assert prepared["resumeStep"] == newest, (
            f"attempt {attempt} resumed from {prepared['resumeStep']}, not {newest}"
        )
        if newest:
            expect_whole(Path(str(prepared["resumeDir"])), newest)
            seen.resumed.append(newest)
        processes = [fork.Process(target=keep, args=(around,)), fork.Process(target=program, args=(around, newest))]
        for process in processes:
            process.start()
        time.sleep(draw.uniform(0, SECONDS_MAX))  # not a wait: it decides which moment is tried
        victims = draw.choice([processes, processes[:1], processes[1:]])
        for victim in victims:
            victim.kill()
        time.sleep(draw.uniform(0, SECONDS_MAX / 4))  # not a wait: the other goes on for a while
        for process in processes:
            process.kill()
            process.join()
        seen.kills += 1
        load_all(store, seen, root / "loaded")
        shutil.rmtree(around.worker_dir.parent)
    return seen


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills.programs.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        seen = kill_many(Path(root), chosen.kills, chosen.seed)
    print(
        f"{seen.kills} kills, {len(seen.published)} checkpoints published, {seen.loaded} loads, {len(seen.resumed)} "
        f"resumes, none torn; {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
