"""Models made of commits by the trainer's own tool, a few at a time, each in a folder that is kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import mmap
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from muster.storage.errors import StorageError
from muster.storage.opening import open_store
from muster.words.address import StorageAddress
from muster.words.base import UserError

log = structlog.get_logger("muster.api.exports")

AT_ONCE = 2  # each takes a core, and reads and writes as fast as the disk lets it
KEPT_SECONDS = 3600.0  # since somebody last read of it
FAILURE_SECONDS = 30.0  # that a failure is told before the next request tries anew
TOOL = "muster.trainer.convert.export"


@dataclass(frozen=True)
class ExportOrder:
    """Description of an exported model: the job's checkpoint and the format."""

    job_id: str
    folder: StorageAddress  # the job's, where its commits are
    step: int
    format: str
    dtype: str
    ema: bool

    @property
    def name(self) -> str:
        """Return the name of the export's folder, on disk and in the archive."""
        return f"step-{self.step}-{self.format}-{self.dtype}{'-ema' if self.ema else ''}"


@dataclass
class ExportProgress:
    """Progress of an export: the bytes read, of the total. `fault` says why it ended without a model, and `is_users`
    says that the request is to blame for that."""

    done: int = 0
    total: int = 0
    fault: str = ""
    is_users: bool = False
    ended_at: float | None = None

    def holds(self, to: str) -> bool:
        """Return whether this is still the current result: the export is running, has just failed, or has written to
        `to`."""
        if self.ended_at is None or (to and not self.fault):
            return True
        return bool(self.fault) and time.monotonic() - self.ended_at < FAILURE_SECONDS


class ModelExports:
    """The models that were made, below `root`, and those that are being made by this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._room = asyncio.Semaphore(AT_ONCE)
        self._making: dict[tuple[ExportOrder, str], tuple[asyncio.Task[None], ExportProgress]] = {}

    def folder(self, order: ExportOrder) -> Path:
        return self.root / order.job_id / order.name

    def made(self, order: ExportOrder) -> bool:
        """Return whether the export exists and is complete. If it is, it is kept for a while longer."""
        try:
            os.utime(self.folder(order))
        except FileNotFoundError:
            return False
        return True

    def begin(self, order: ExportOrder, to: str = "") -> tuple[ExportProgress, bool]:
        """See that it is being made, and written to `to` if that is given: how far that is, and whether it begins now.

        What was written to an address is not written there again until this has forgotten it.
        """
        if (running := self._making.get((order, to))) is not None and running[1].holds(to):
            return running[1], False
        progress = ExportProgress()
        self._making[order, to] = (asyncio.create_task(self._run(order, to, progress)), progress)
        return progress, True

    async def wait(self, order: ExportOrder, seconds: float, to: str = "") -> None:
        """Wait until the export has ended, but at most so many seconds."""
        if (running := self._making.get((order, to))) is not None:
            await asyncio.wait([running[0]], timeout=seconds)

    async def stop(self) -> None:
        for task, _ in self._making.values():
            task.cancel()
        await asyncio.gather(*(task for task, _ in self._making.values()), return_exceptions=True)

    def drop_old(self) -> None:
        """Remove what nobody has read for a while. What is being read keeps its folder by that."""
        self._making = {
            key: (task, progress)
            for key, (task, progress) in self._making.items()
            if progress.ended_at is None or time.monotonic() - progress.ended_at < KEPT_SECONDS
        }
        busy = {self.folder(order) for (order, _), (task, _) in self._making.items() if not task.done()}
        with contextlib.suppress(FileNotFoundError):
            for job in self.root.iterdir():
                for folder in job.iterdir():
                    of_busy = any(folder.name.startswith(each.name) and folder.parent == each.parent for each in busy)
                    if not of_busy and time.time() - folder.stat().st_mtime > KEPT_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    job.rmdir()

    async def _run(self, order: ExportOrder, to: str, progress: ExportProgress) -> None:
        try:
            async with self._room:
                if not self.made(order):
                    await self._make(order, progress)
                if to:
                    await asyncio.to_thread(_send, self.folder(order), to, progress)
        except UserError as error:
            progress.fault, progress.is_users = str(error), True
        except (StorageError, OSError) as error:
            progress.fault = str(error)
            log.warning("an export failed", job=order.job_id, step=order.step, cause=str(error)[:500])
        finally:
            progress.ended_at = time.monotonic()

    async def _make(self, order: ExportOrder, progress: ExportProgress) -> None:
        """Raises UserError for what can't be asked of this commit, StorageError for what may be right later."""
        target = self.folder(order)
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        arguments = ["--checkpoint", str(order.folder), "--to", str(target), "--step", str(order.step)]
        arguments += ["--format", order.format, "--dtype", order.dtype, *(["--ema"] if order.ema else [])]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", TOOL, *arguments, "--json", "--progress"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        said = ""
        try:
            assert process.stderr is not None
            async for line in process.stderr:
                words = line.decode(errors="replace").strip()
                if words.startswith("progress "):
                    progress.done, progress.total = map(int, words.split()[1:3])
                elif words:
                    said = words
            code = await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            left = target.with_name(f"{target.name}.unfinished-{process.pid}")  # another process may make it as well
            await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        if code and not self.made(order):  # else another process was quicker
            raise (UserError if code in (2, 80) else StorageError)(_reason(said, code))


def available() -> bool:
    """Return whether the trainer's export tool can run here. An image of the API alone has none of the trainer's
    libraries."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "safetensors"))


def _reason(said: str, code: int) -> str:
    try:
        return str(json.loads(said)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the tool that makes the model ended with code {code}: {said[:300]}"


def _send(folder: Path, to: str, progress: ExportProgress) -> None:
    """Write every file below `folder` to a store. Raises StorageError, AddressError."""
    store = open_store(to)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    progress.done, progress.total = 0, sum(path.stat().st_size for path in files)

    def sent(count: int) -> None:
        progress.done += count

    for path in files:
        key = path.relative_to(folder).as_posix()
        if not path.stat().st_size:
            store.replace(key, b"")
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = memoryview(mapped)
            try:
                store.verify(store.write(key, view, sent))
            finally:
                view.release()
