"""Keepers of a gang on this machine: real ones, with a real store, driven look by look."""

import json
import os
import time
from pathlib import Path

from muster.recipe.document import WorkerConfig
from muster.storage.file_store import FileStore
from muster.storage.listing import steps_in
from muster.storage.small_files import write_whole
from muster.storage.store import Store
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.folder_files import write_folder
from muster.trainer.programs import WorkerOrders, read_surroundings
from muster.trainer.programs.keeper import FolderKeeper
from muster.words.checkpoint import Commit
from muster.words.names import PROGRESS, RANKS_ENDED, Env, Rendezvous

LOOKS_MAX = 6_000


def environment_of(root: Path, worker: int = 0, workers: int = 1, ranks: int = 1, **more: str) -> dict[str, str]:
    """Environment of a worker whose store is `root/store/uid`."""
    program = {"program": {"command": ["train.py"]}, "checkpoint": json.loads(more.pop("checkpoint", "{}"))}
    worker_dir = root / f"attempt-{more.get('attempt', '1')}" / f"worker-{worker}"
    worker_dir.mkdir(parents=True, exist_ok=True)
    return {
        Env.CONFIG: WorkerConfig.model_validate(program).model_dump_json(by_alias=True),
        Env.JOB: "j", Env.JOB_UID: "uid", Env.ATTEMPT: more.get("attempt", "1"), Env.WORKER: str(worker),
        Env.RESUME_STEP: more.get("resume_step", "0"), Env.CHECKPOINT_URI: (root / "store" / "uid").as_uri(),
        Env.FENCE: more.get("fence", ""), Env.WORKER_DIR: str(worker_dir),
        Env.CHECKPOINT_DIR: more.get("folder", str(worker_dir / "checkpoints")),
        Rendezvous.NODES: str(workers), Rendezvous.RANKS_PER_NODE: str(ranks),
    }  # fmt: skip


def surroundings(root: Path, worker: int = 0, workers: int = 1, ranks: int = 1, **more: str) -> WorkerOrders:
    """Orders of a worker in that environment."""
    return read_surroundings(environment_of(root, worker, workers, ranks, **more))


class Bench:
    """One worker's keeper, and what its program would do."""

    def __init__(self, root: Path, store: Store | None = None, **more: object) -> None:
        self.around = surroundings(root, **more)  # type: ignore[arg-type]
        self.store = store or FileStore(root / "store" / "uid", links=False)
        self.folder = self.around.watched
        self.keeper = FolderKeeper(self.around, self.store, retry_seconds=(0.0,))
        self.keeper.begin()

    def write(self, path: str, data: bytes = b"x" * 100) -> Path:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        return target

    def save(self, name: str, **files: bytes) -> None:
        """Save a checkpoint as a careful program does: under another name, and then renamed."""
        for path, data in (files or {"weights": name.encode()}).items():
            self.write(f".{name}.partial/{path}", data)
        (self.folder / f".{name}.partial").rename(self.folder / name)

    def stepped(self, step: int, rank: int = 0, after: float = 1.0, **values: object) -> None:
        """A rank has finished a step, `after` seconds after now, so that no clock's grain decides."""
        document = {"pid": os.getpid(), "step": step, "at": time.time(), "progressedAt": time.time() + after, **values}
        write_whole(self.around.worker_dir / PROGRESS.format(rank=rank), json.dumps(document))

    def ended(self, *codes: int) -> None:
        ranks = [{"rank": rank, "exitCode": code} for rank, code in enumerate(codes)]
        write_whole(self.around.worker_dir / RANKS_ENDED, json.dumps({"ranks": ranks}))

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.keeper.look(0.0)

    def settle(self) -> None:
        """Look until nothing is under way."""
        self.look()
        settle(self)

    def steps(self) -> tuple[int, ...]:
        return steps_in(self.store)

    def commit(self, step: int) -> Commit:
        return commit_in(self.store, step, own=True)

    def loaded(self, step: int, into: Path) -> dict[str, bytes]:
        """Return what a fresh process would find of a checkpoint."""
        write_folder(self.store, self.commit(step), into)
        return {path.relative_to(into).as_posix(): path.read_bytes() for path in into.rglob("*") if path.is_file()}


def settle(*benches: Bench) -> None:
    """Let keepers look in turn until none has anything under way."""
    for _ in range(LOOKS_MAX):
        for bench in benches:
            bench.keeper.look(0.01)
        if all(bench.keeper.is_idle for bench in benches):
            return
    raise AssertionError(f"still under way: {[bench.keeper.state for bench in benches]}")
