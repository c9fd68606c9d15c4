"""The drill's handle on the nursery: order a gang, meddle while it lives, read what it said."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LIFE_SECONDS_MAX = 120


@dataclass(frozen=True)
class Life:
    """codes: exit code of each rank. notes: what each rank said, in order."""

    codes: list[int]
    notes: list[list[dict[str, Any]]]

    def said(self, word: str, rank: int = 0) -> list[dict[str, Any]]:
        return [note for note in self.notes[rank] if word in note]


class Nursery:
    def __init__(self, errors: Path) -> None:
        self._errors, self._place = errors.open("ab"), errors.parent
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.drills.checkpoint.nursery"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def live(self, meddle: Callable[["Meeting"], None] | None = None, **order: Any) -> Life:
        """One gang's life. `meddle` runs beside it, and may kill."""
        with self.folder() as folder:
            meeting = Meeting(Path(folder), order["world"])
            threads = []
            if meddle is not None:
                threads = [threading.Thread(target=meddle, args=(meeting,), daemon=True)]
                threads[0].start()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps({**order, "meeting": folder}), file=self._process.stdin, flush=True)
            watchdog = threading.Timer(LIFE_SECONDS_MAX, self._process.kill)
            watchdog.start()
            answer = self._process.stdout.readline()
            watchdog.cancel()
            meeting.over.set()
            for thread in threads:
                thread.join()
            if not answer:
                raise TimeoutError(f"a gang did not end within {LIFE_SECONDS_MAX} s: {order}")
            return Life(json.loads(answer), [meeting.notes(rank) for rank in range(order["world"])])

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder that goes with the drill, however it ends."""
        return tempfile.TemporaryDirectory(dir=self._place)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIFE_SECONDS_MAX)
        self._errors.close()


class Meeting:
    """What can be seen of a gang that lives. over: set when it does no more."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.over = threading.Event()

    def notes(self, rank: int) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"notes-{rank}.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines if line.endswith("}")]
        return []

    def wait_for(self, word: str, rank: int, count: int = 1) -> dict[str, Any] | None:
        """The count-th note with this word; None when the gang ends without it."""
        while not self.over.wait(0.005):
            found = [note for note in self.notes(rank) if word in note]
            if len(found) >= count:
                return found[count - 1]
        return None

    def kill(self, pid: int) -> bool:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            return False
        return True

    def uploader_pid(self, rank: int) -> int | None:
        note = self.wait_for("uploader", rank)
        return note["uploader"] if note else None

    def rank_pid(self, rank: int) -> int | None:
        """The rank is the parent of its upload process."""
        uploader = self.uploader_pid(rank)
        return _parent(uploader) if uploader is not None else None


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


@contextlib.contextmanager
def nursery(errors: Path) -> Iterator[Nursery]:
    made = Nursery(errors)
    try:
        yield made
    finally:
        made.close()
