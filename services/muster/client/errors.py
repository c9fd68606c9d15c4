"""Errors between a program and Muster. Each says what happened, where, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pydantic comes with it, and `muster --help` should not wait for that
    from muster.words.base import DocumentProblem

BUSY = (429, 502, 503, 504)
_INVALID = (400, 413, 415, 422)


@dataclass(eq=False)
class MusterError(Exception):
    """`what` is one sentence and `code` its stable name for programs. `problems` are the places of a document or of a
    parameter that are wrong; `next_step` says what to do; `details` hold what else the server said, such as its
    `status` and `requestId`.
    """

    what: str
    code: str = "error"
    problems: tuple[DocumentProblem, ...] = ()
    next_step: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        places = [f"  {_placed(problem)}" for problem in self.problems if problem.message not in self.what]
        return "\n".join([self.what, *places, *([f"  next: {self.next_step}"] if self.next_step else [])])


class Unavailable(MusterError):
    """Error of a request that nobody has answered. The request may be repeated."""


class Unreachable(Unavailable):
    """No answer from the server, after retries."""

    def __init__(self, server: str, reason: str, next_step: str = "") -> None:
        super().__init__(
            what=f"no Muster answers at {server}: {reason}",
            code="unreachable",
            next_step=next_step or "start one with `muster up`, or name another by MUSTER_SERVER",
            details={"server": server},
        )


class Busy(Unavailable):
    """The server or what it stands on had no time for the request, after retries. Nothing was done."""


class InvalidRequest(MusterError):
    """A document, a parameter or a setting that makes no sense. Nothing was done."""


class Refused(MusterError):
    """The server said no."""


class NotAllowed(Refused):
    """Error of a request without a sign-in, or of a person without the permission."""


class NotFound(Refused):
    """Error for a resource that does not exist, or that this person may not see."""


class Conflict(Refused):
    """Conflict with something that exists, such as a job of the same name."""


class JobFailed(MusterError):
    """A job that was waited for did not succeed. `details` hold its id, its phase and its last failure."""


class WaitTimeout(MusterError, TimeoutError):
    """A job that was waited for has not ended in time. It goes on."""


def refusal(status: int, body: Mapping[str, Any], server: str, signed_in: bool = False) -> MusterError:
    """The server's problem+json as an error. `server` is its address."""
    from muster.words.base import DocumentProblem
    from muster.words.text import plural

    code = str(body.get("code") or f"http-{status}")
    what = str(body.get("detail") or body.get("title") or f"{server} answered with status {status}")
    problems = tuple(
        DocumentProblem(str(entry.get("path", "")), str(entry.get("message", "")), entry.get("didYouMean"))
        for entry in body.get("errors") or ()
    )
    if code == "invalid_job" and problems:  # the detail repeats the first of them
        what = f"the job is not valid: {plural(len(problems), 'problem')}"
    elif code == "invalid_parameter" and problems:
        what = "; ".join(str(problem).removeprefix("query.") for problem in problems)
    details = {"status": status} | ({"requestId": body["requestId"]} if body.get("requestId") else {})
    return _kind(status)(what, code, problems, _next_step(status, code, body, signed_in), details)


def _kind(status: int) -> type[MusterError]:
    if status in BUSY:
        return Busy
    if status in _INVALID:
        return InvalidRequest
    return {401: NotAllowed, 403: NotAllowed, 404: NotFound, 409: Conflict}.get(status, Refused)


def _next_step(status: int, code: str, body: Mapping[str, Any], signed_in: bool) -> str:
    if status == 401 and signed_in:
        return "`muster login` signs in anew"
    if status == 401:
        return "set MUSTER_TOKEN, or put the token into ~/.config/muster/token (mode 600)"
    if code == "project_not_found":
        return "`muster whoami` says which projects there are for you"
    if code == "name_taken":
        return "submit it under another name"
    if status in BUSY:
        return "try again in a moment; nothing was done"
    if status >= 500:
        request = body.get("requestId")
        return f"the server's log has the reason{f' under request {request}' if request else ''}"
    return ""


def _placed(problem: DocumentProblem) -> str:
    return f"line {problem.line}, column {problem.column}: {problem}" if problem.line else str(problem)
