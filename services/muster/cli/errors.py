"""Ends of commands: exit codes that scripts can rely on, and errors that say what, where and what next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from muster.client.errors import InvalidRequest, MusterError, Unavailable

if TYPE_CHECKING:  # pydantic comes with it, and `--help` should not wait for that
    from muster.words.base import DocumentProblem


class ExitStatus(IntEnum):
    OK = 0
    FAILED = 1  # the job failed, or the server said no
    USAGE = 2  # bad arguments or bad input; nothing was done
    UNREACHABLE = 3  # no server answers
    INTERRUPTED = 130  # Ctrl-C
    UNREAD = 141  # nobody reads the output any more, as in `muster logs -f | head`: what a shell says of SIGPIPE


@dataclass(frozen=True)
class DocumentFault:
    """One thing wrong in a person's document, with its place in the file or the --set that it comes from."""

    problem: DocumentProblem
    line: int | None = None  # from 1, as is the column
    column: int | None = None
    excerpt: str = ""  # that line
    setting: str = ""  # `--set PATH=VALUE`


class CliError(MusterError):
    """A command can't go on. The handler in main.py shows it and exits with `exit_code`.

    `what` is one sentence and `code` its stable name for programs. The faults name lines of `file`. `next_step` says
    what to do, often by a command; `details` go into the JSON form alone.
    """

    def __init__(
        self,
        what: str,
        exit_code: ExitStatus = ExitStatus.FAILED,
        code: str = "error",
        file: str = "",
        faults: tuple[DocumentFault, ...] = (),
        next_step: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(what, code, tuple(fault.problem for fault in faults), next_step, details or {})
        self.exit_code, self.file, self.faults = exit_code, file, faults

    def __str__(self) -> str:
        return self.what

    def document(self) -> dict[str, Any]:
        """Return the document that `--json` prints on standard output."""
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


def cli_error(error: MusterError) -> CliError:
    """The client's error in the words of the commands: with an exit code, options and what to type next."""
    if isinstance(error, CliError):
        return error
    unavailable, invalid = isinstance(error, Unavailable), isinstance(error, InvalidRequest)
    exit_code = ExitStatus.UNREACHABLE if unavailable else ExitStatus.USAGE if invalid else ExitStatus.FAILED
    what, problems = error.what, error.problems
    if error.code == "invalid_parameter" and problems:  # of a query: what an option says
        what, problems = "; ".join(str(problem).replace("query.", "--", 1) for problem in problems), ()
    next_step = _COMMANDS.get(error.code) or error.next_step.replace(" by MUSTER_", " with --server or MUSTER_")
    faults = tuple(DocumentFault(problem) for problem in problems)
    return CliError(what, exit_code, error.code, faults=faults, next_step=next_step, details=error.details)


# What to do next, by the code of an error, where a command does it.
_COMMANDS = {
    "job_not_found": "`muster ls` lists the jobs",
    "project_not_found": "`muster whoami` says which projects there are for you; `--project` names another",
    "name_taken": "`--name` submits it under another name; `muster get` shows the one that has it",
}


def usage(what: str, next_step: str = "", code: str = "usage") -> CliError:
    """Bad arguments or input, noticed before anything was done."""
    return CliError(what=what, exit_code=ExitStatus.USAGE, code=code, next_step=next_step)
