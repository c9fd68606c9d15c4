"""Judgement of how a program's worker ended, from exit codes and the end of each rank's output.

A program tells no cause by itself. What its last traceback says is mapped onto an exit code of the contract only where
it is certain what it means; anything else keeps the code that the program ended with, and the first line of what it
said.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.worker.names import ExitCode
from muster.worker.ranks import SHUTDOWN_SECONDS, ProcessEnd

TAIL_LINES = 40
WORDS_MAX = 1_000
# A program may end with these itself, where it knows. The others are the launcher's own to say.
_OF_PROGRAMS = (ExitCode.USER_ERROR, ExitCode.OUT_OF_MEMORY, ExitCode.NUMERIC, ExitCode.STORAGE)
_OF_LAUNCHER = range(ExitCode.PREFLIGHT_FAILED, ExitCode.HUNG + 2)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_OF_INNER_LAUNCHERS = ("ChildFailedError", "CalledProcessError")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# The last line of a traceback: `torch.OutOfMemoryError: CUDA out of memory. …`, also behind a logger's prefix.
_ERROR = re.compile(
    r"(?:^|[\s\]])((?:[A-Za-z_][\w]*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)))(?::(?: (.*))?)?$"
)

_OUT_OF_MEMORY = ("cuda out of memory", "hip out of memory", "defaultcpuallocator: can't allocate memory")
_XLA_OUT_OF_MEMORY = ("resource_exhausted: out of memory", "resource_exhausted: failed to allocate")
_HUNG = ("watchdog caught collective operation timeout", "timed out waiting for all ranks")
_PEER_LOST = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "connection was likely closed",
    "remote process exited", "ncclremoteerror", "socket closed", "connection refused",
)  # fmt: skip
_DISTRIBUTED = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
# torch.save does not report the error of a disk that takes no more: its C++ stream fails (`iostream error`), and then
# the archive that it closes is too short (`unexpected pos`, caffe2/serialize/inline_container.cc).
_CANT_BE_WRITTEN = (
    "[errno 28]", "[errno 122]", "no space left on device", "disk quota exceeded",
    "pytorchstreamwriter failed writing", "basic_ios::clear: iostream error", "] . unexpected pos ",
)  # fmt: skip
_CANT_BE_IMPORTED = ("ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")


@dataclass(frozen=True)
class OutputWords:
    """Reading of the end of a rank's output."""

    text: str = ""
    """One line for people; empty where nothing is said."""
    exit_code: int | None = None
    """Exit code of the contract where the cause is certain."""
    collective_failed: bool = False
    """Whether a collective failed because another rank went or did not come."""


def recorded_traceback(document: Mapping[str, Any] | None) -> str:
    """Return the traceback of an error file as torch's `record` writes it; empty where there is none."""
    value: Any = document
    for key in ("message", "extraInfo", "py_callstack"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


def read_words(tail: str, recorded: str = "") -> OutputWords:
    """Return what the end of an output says of the cause: of the first traceback's error, or of the process' own last
    words. Where the output has no traceback (it was redirected), `recorded` may hold one."""
    lines = [_COLOURS.sub("", line).rstrip() for line in tail.splitlines()]
    error = _first_error(lines) or _first_error(recorded.splitlines())
    lower = "\n".join(lines).lower()
    if error is None:
        return _without_traceback(lines, lower)
    kind, message = error
    text = f"{kind}: {message}" if message else kind
    short, low = kind.rpartition(".")[2], message.lower()
    if short in ("OutOfMemoryError", "MemoryError") or any(
        words in low for words in _OUT_OF_MEMORY + _XLA_OUT_OF_MEMORY
    ):
        return OutputWords(text, ExitCode.OUT_OF_MEMORY)
    if any(words in low for words in _HUNG):
        return OutputWords(text, ExitCode.HUNG, collective_failed=True)
    if short in _DISTRIBUTED or (short == "RuntimeError" and ("gloo" in low or "nccl" in low)):
        if "eaddrinuse" in low or "address already in use" in low:
            return OutputWords(text, ExitCode.PREFLIGHT_FAILED)
        lost = any(words in low for words in _PEER_LOST)
        return OutputWords(text, ExitCode.PEER_LOST if lost else None, collective_failed=True)
    if any(words in low for words in _CANT_BE_WRITTEN):
        return OutputWords(text, ExitCode.STORAGE)
    if short in _CANT_BE_IMPORTED:
        return OutputWords(text, ExitCode.USER_ERROR)
    return OutputWords(text)


def _without_traceback(lines: Sequence[str], lower: str) -> OutputWords:
    if any(words in lower for words in _HUNG):
        line = next(line for line in lines if any(words in line.lower() for words in _HUNG))
        return OutputWords(line.strip()[:WORDS_MAX], ExitCode.HUNG, collective_failed=True)
    said = [line for line in lines if line.strip()]
    last = said[-1].strip()[:WORDS_MAX] if said else ""
    if "can't open file" in last or "No module named" in last:  # the interpreter's own words
        return OutputWords(last, ExitCode.USER_ERROR)
    if re.match(r"(?:SyntaxError|IndentationError|TabError): ", last):  # of the script itself: it has no traceback
        return OutputWords(last, ExitCode.USER_ERROR)
    if re.match(r"\S+: error: ", last) and any(line.startswith("usage: ") for line in said):  # argparse's
        return OutputWords(last, ExitCode.USER_ERROR)
    return OutputWords(last)


def _first_error(lines: Sequence[str]) -> tuple[str, str] | None:
    """Return kind and message of the error that a program ended with: of the last traceback, or, where that was raised
    while another error was handled, of the first one of these, which is their cause. What a launcher within the program
    raises of its own ranks' end (torchrun, accelerate) says nothing."""
    errors: list[tuple[str, str]] = []
    begun: list[int] = []  # the line after each one's end
    for number in [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]:
        end = _error_after(lines, number)
        if end is None or end[0].rpartition(".")[2] in _OF_INNER_LAUNCHERS:
            continue
        between = lines[begun[-1] : number] if begun else []
        if not any(line.strip().endswith(_CHAINED) for line in between):
            errors.clear()
        errors.append(end[:2])
        begun.append(end[2])
    return errors[0] if errors else None


def _error_after(lines: Sequence[str], number: int) -> tuple[str, str, int] | None:
    """Return kind and message of the error below the traceback that begins in that line, and the line after it."""
    prefix = lines[number][: -len(_TRACEBACK)]
    for place in range(number + 1, len(lines)):
        line = lines[place]
        body = line[len(prefix) :] if prefix and line.startswith(prefix) else line
        if line.endswith(_TRACEBACK):
            return None
        if body[:1].isspace() or not body:
            continue
        if match := _ERROR.search(body):
            more = lines[place + 1].strip() if not match[3] and place + 1 < len(lines) else ""
            return match[1], (match[3] or more)[:WORDS_MAX], place + 1
    return None


def judge(
    ends: Sequence[ProcessEnd],
    tail_of: Callable[[int], str],
    step_of: Callable[[int], int],
    steps: int | None,
    oom_killed: bool = False,
    recorded_of: Callable[[int], str] = lambda rank: "",
) -> dict[str, Any]:
    """Return the exit record of a worker whose ranks ended so, if nobody asked it to stop. `steps` is how many the
    program should have taken, where that is stated; `recorded_of` returns the traceback that a rank has recorded."""
    failures = [end for end in ends if end.exit_code]
    if not failures:
        return _ended_well(ends, tail_of, step_of, steps)
    first = min(end.at for end in failures)
    words = {end.rank: read_words(tail_of(end.rank), recorded_of(end.rank)) for end in failures}

    def order(end: ProcessEnd) -> tuple[int, float]:
        asked = end.exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM) and end.at > first
        cleaned_up = end.exit_code == -signal.SIGKILL and end.at > first + SHUTDOWN_SECONDS - 1
        if asked or cleaned_up:
            return 3, end.at
        if words[end.rank].exit_code in (ExitCode.PEER_LOST, ExitCode.HUNG):
            return 2, end.at
        return (1 if words[end.rank].collective_failed else 0), end.at

    end = min(failures, key=order)
    record = _failure(end, words[end.rank], step_of(end.rank), oom_killed)
    early = next((each for each in ends if not each.exit_code and each.at <= end.at), None)
    if record["exitCode"] == ExitCode.PEER_LOST and early is not None:  # nobody took that peer away
        message = f"{record['message']}; rank {early.rank} had ended with exit code 0 before, and was missing"
        return {**record, "exitCode": 1, "message": message}
    return record


def _failure(end: ProcessEnd, words: OutputWords, step: int, oom_killed: bool) -> dict[str, Any]:
    killed_by = -end.exit_code if end.exit_code < 0 else None
    code = 128 + killed_by if killed_by else end.exit_code
    said = f": {words.text}" if words.text else ", and said nothing; see its log"
    if killed_by == signal.SIGKILL:
        by = " by the kernel, for want of memory" if oom_killed else ""
        message = f"{end.words}{by}"
        if oom_killed:
            code = int(ExitCode.OUT_OF_MEMORY)
    else:
        message = f"{end.words}{said}"
    if words.exit_code is not None and killed_by != signal.SIGKILL:
        code = words.exit_code
    elif not killed_by and code in _OF_LAUNCHER and code not in _OF_PROGRAMS:
        message += f" (a program can't end with {code}, which means something else to Muster: taken for 1)"
        code = 1
    return record(code, message, rank=end.rank, signal=killed_by, step=step)


def _ended_well(
    ends: Sequence[ProcessEnd], tail_of: Callable[[int], str], step_of: Callable[[int], int], steps: int | None
) -> dict[str, Any]:
    """Every rank ended with 0. One whose last words are a failed collective has not done its part, unless it has taken
    all steps: it caught the error, and a shell around it forgot the exit code."""
    for end in ends:
        tail = "\n".join(tail_of(end.rank).rstrip().splitlines()[-TAIL_LINES:])
        words = read_words(tail)
        complete = steps is not None and step_of(end.rank) >= steps
        if words.collective_failed and not complete:
            message = (
                f"rank {end.rank} ended with exit code 0, but the last that it wrote is a failed collective: "
                f"{words.text}. Let the program end with an exit code other than 0 when it fails"
            )
            return record(words.exit_code or ExitCode.PEER_LOST, message, rank=end.rank, step=step_of(end.rank))
    return record(ExitCode.DONE, "", step=max((step_of(end.rank) for end in ends), default=None))


def record(
    exit_code: int, message: str, rank: int | None = None, signal: int | None = None, step: int | None = None
) -> dict[str, Any]:
    """Return an exit record (WorkerExit of the contract)."""
    return {
        "exitCode": int(exit_code),
        "at": time.time(),
        "message": message,
        "rank": rank,
        "signal": signal,
        "step": step,
    }


def log_tail(text: str) -> str:
    """Return the last lines of an output."""
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])[-16_384:]


def oom_kills() -> int | None:
    """Return the number of processes that the kernel has killed for lack of memory in this control group, or on this
    machine; None where that is unknown."""
    for path, name in (("/sys/fs/cgroup/memory.events", "oom_kill "), ("/proc/vmstat", "oom_kill ")):
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith(name):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return None
