"""How a command ends: exit codes that scripts can rely on, and errors that say what, where and what next."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pydantic comes with it, and `--help` should not wait for that
    from muster.contract.base import Problem


class Exit(IntEnum):
    OK = 0
    FAILED = 1  # the job failed, or the server said no
    USAGE = 2  # bad arguments or bad input; nothing was done
    UNREACHABLE = 3  # no server answers
    INTERRUPTED = 130  # Ctrl-C


@dataclass(frozen=True)
class Fault:
    """One thing wrong in a person's document, with its place in the file or the --set that it comes from."""

    problem: Problem
    line: int | None = None  # from 1, as is the column
    column: int | None = None
    excerpt: str = ""  # that line
    setting: str = ""  # `--set PATH=VALUE`


@dataclass
class CliError(Exception):
    """A command can't go on. The handler in main.py shows it and exits with `exit_code`.

    `what` is one sentence and `code` its stable name for programs. The faults name lines of `file`. `next_step` says
    what to do, often by a command; `details` go into the JSON form alone.
    """

    what: str
    exit_code: Exit = Exit.FAILED
    code: str = "error"
    file: str = ""
    faults: tuple[Fault, ...] = ()
    next_step: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what

    def document(self) -> dict[str, Any]:
        """What `--json` prints on standard output."""
        faults = [
            {
                "path": fault.problem.path,
                "message": fault.problem.message,
                "didYouMean": fault.problem.did_you_mean,
                "line": fault.line,
                "column": fault.column,
            }
            | ({"setting": fault.setting} if fault.setting else {})
            for fault in self.faults
        ]
        error: dict[str, Any] = {"code": self.code, "message": self.what, "exitCode": int(self.exit_code)}
        error |= {"file": self.file} if self.file else {}
        error |= {"problems": faults} if faults else {}
        error |= {"next": self.next_step} if self.next_step else {}
        return {"error": error | self.details}


class Unreachable(CliError):
    """No answer from the server, after retries."""

    def __init__(self, server: str, reason: str, next_step: str = "") -> None:
        super().__init__(
            what=f"no Muster answers at {server}: {reason}",
            exit_code=Exit.UNREACHABLE,
            code="unreachable",
            next_step=next_step or "start one with `muster up`, or name another with --server or MUSTER_SERVER",
            details={"server": server},
        )


def usage(what: str, next_step: str = "", code: str = "usage") -> CliError:
    """Bad arguments or input, noticed before anything was done."""
    return CliError(what=what, exit_code=Exit.USAGE, code=code, next_step=next_step)
