"""`make test-gpu`: what only a GPU can show, within ten minutes, in one table, with what could not be done.

    python -m tests.gpu.rehearsal [--seconds 600] [--only TEXT] [--json FILE] [--logs FOLDER]

Each line is a process of its own with a limit of its own, so that one that hangs or runs out of memory costs the others
nothing. On a GPU the checks, which are small, run side by side; what is timed has the GPU to itself. Without a GPU it
says so, and makes the checks that torch can make on a CPU, at toy size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.gpu import checks, measure

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = "no GPU was there"
# Of a check; compiling alone takes most of it. On an H100 the block masks of two families took longer than 120 s beside
# eleven others, and 176 s beside one. The estimate, under way meanwhile, takes 210 s: which adds 30 s at most.
CHECK_SECONDS_MAX = {"cuda": 240.0, "cpu": 300.0}
TOGETHER = {"cuda": 12, "cpu": 1}  # processes that check at one time


@dataclass(frozen=True)
class Line:
    """One line of the table. outcome: ok, FAILED or not done. beside: a published figure, where there is one."""

    what: str
    outcome: str
    seen: str
    beside: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Item:
    """command: ends with 0; the last line of its standard output is what was seen. needs: bytes of device memory.
    alone: it is timed, and has the GPU to itself."""

    what: str
    command: tuple[str, ...]
    seconds_max: float
    beside: str = ""
    needs: int = 0
    alone: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of it")
    parser.add_argument("--only", default="", help="lines that hold this text")
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--logs", type=Path, help="write what each process printed into this folder")
    given = parser.parse_args()
    lines = tuple(_rehearse(Limits(time.monotonic() + given.seconds, given.logs), given.only))
    _show(lines)
    if given.json:
        given.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")
    return 1 if any(line.outcome == "FAILED" for line in lines) else 0


@dataclass(frozen=True)
class Limits:
    """deadline: of all, on the monotonic clock. logs: where to write what each process printed."""

    deadline: float
    logs: Path | None


def _rehearse(limits: Limits, only: str) -> Iterator[Line]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else NO_GPU
    print(f"{name}; torch {torch.__version__}", flush=True)
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    items = [item for item in _items(device) if only in item.what]
    for item in [item for item in items if item.needs > memory]:
        yield _told(Line(item.what, "not done", f"needs {item.needs / 2**30:.0f} GiB", item.beside))
    items = [item for item in items if item.needs <= memory]
    together = [item for item in items if not item.alone]
    with ThreadPoolExecutor(max_workers=TOGETHER[device]) as pool:
        yield from pool.map(lambda item: _told(_run(item, limits)), together)
    yield from (_told(_run(item, limits)) for item in items if item.alone)
    if device == "cpu":
        yield from (Line(item.what, "not done", NO_GPU, item.beside) for item in _on_cuda_alone() if only in item.what)


def _items(device: str) -> Iterator[Item]:
    if device == "cuda":
        yield from _on_cuda_alone()
    for check in checks.CHECKS:
        words = (sys.executable, "-m", "tests.gpu.rehearsal_item", check.__name__, device)
        yield Item(check.__name__.replace("_", " "), words, CHECK_SECONDS_MAX[device])


def _on_cuda_alone() -> Iterator[Item]:
    """The longest first among those that run side by side, the most telling first among those that run alone: the ten
    minutes may not suffice for the last."""
    yield Item(
        "the estimate against the real peak",
        (sys.executable, "benchmarks/estimate.py", "--gpu"),
        240,
        "aim: within 10 %",
        75 * 2**30,
    )
    for what, name in (
        ("NCCL, FSDP on one device, every precision", "every_precision"),
        ("kill and resume bit for bit", "bit_for_bit"),
        ("attention of packed documents in a whole model", "flex_attention"),
    ):
        tests = ("-p", "no:cacheprovider", "tests/integration/trainer/test_trainer_cuda.py", "-k", name)
        yield Item(what, (sys.executable, "-m", "pytest", "-q", *tests), 240)
    yield Item("the agent against the real NVML", _measured("agent_sees"), 60)
    yield Item(
        "training blocked by saving 1B weights", _measured("blocked_by_commits"), 150, "", 40 * 2**30, alone=True
    )
    for case in measure.SPEEDS:
        yield Item(case.name, _measured("speed_of", case.name), 150, case.published, case.needs, alone=True)


def _measured(function: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.gpu.rehearsal_item", function, *words)


def _run(item: Item, limits: Limits) -> Line:
    began = time.monotonic()
    seconds = min(limits.deadline - began, item.seconds_max)
    if seconds < 10:
        return Line(item.what, "not done", "the time was over", item.beside)
    try:
        done = subprocess.run(item.command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        _write_log(item, limits, (error.stdout or b"").decode(), (error.stderr or b"").decode())
        return Line(item.what, "not done", f"took longer than {seconds:.0f} s", item.beside, seconds)
    took = time.monotonic() - began
    _write_log(item, limits, done.stdout, done.stderr)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == NOT_HERE:
        return Line(item.what, "not done", last, item.beside, took)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [last])[-1]
        return Line(item.what, "FAILED", words[-300:], item.beside, took)
    return Line(item.what, "ok", last, item.beside, took)


def _write_log(item: Item, limits: Limits, *texts: str) -> None:
    if limits.logs:
        limits.logs.mkdir(parents=True, exist_ok=True)
        (limits.logs / f"{item.what.replace(' ', '-').replace(',', '')}.txt").write_text("\n".join(texts))


NOT_HERE = 75  # a check that this machine can't make (EX_TEMPFAIL)


def item_main(names: dict[str, Callable[..., str]], words: list[str]) -> int:
    """One line's process: run the function that is named, print what it saw."""
    try:
        print(names[words[0]](*words[1:]), flush=True)
    except checks.NotHere as reason:
        print(reason, flush=True)
        return NOT_HERE
    return 0


def _told(line: Line) -> Line:
    print(f"  {line.outcome:<9}{line.what} ({line.seconds:.0f} s)", flush=True)
    return line


def _show(lines: tuple[Line, ...]) -> None:
    width = max(len(line.what) for line in lines)
    print()
    for line in lines:
        beside = f"   [{line.beside}]" if line.beside else ""
        print(f"{line.what:<{width}}  {line.outcome:<9} {line.seen}{beside}")


if __name__ == "__main__":
    sys.exit(main())
