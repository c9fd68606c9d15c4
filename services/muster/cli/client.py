"""The REST API as Python calls. Paths are relative to /api/v1; documents are the API's own JSON."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from muster.cli.address import Server
from muster.cli.errors import CliError, Exit, Fault, Unreachable
from muster.cli.signed_in import token_for
from muster.contract.base import Problem
from muster.contract.text import plural

if TYPE_CHECKING:
    import httpx2

# A request that may have been lost is asked again this long: an API that `muster up` restarts is back by then.
PATIENCE_SECONDS = 20.0
# An answer that takes longer is not coming: a busy API's slowest requests (dry runs, pages of logs) take seconds.
ANSWER_SECONDS_MAX = 20.0
SILENCE_SECONDS = 3.0  # after so long a person wants to know what is being waited for
# A stream is waited for longer: whoever follows a job wants to be there when an upgraded API is back.
STREAM_PATIENCE_SECONDS = 300.0
STREAM_SILENCE_SECONDS = 45.0  # three of the server's pings
PAUSE_SECONDS = 0.2
PAUSE_SECONDS_MAX = 2.0
PAGE_JOBS = 500  # the most that the API gives at once
_BUSY = (429, 502, 503, 504)


class Client:
    """One server. Use as a context manager, or close it."""

    def __init__(
        self,
        server: Server,
        patience_seconds: float = PATIENCE_SECONDS,
        waiting: Callable[[str], None] = lambda _: None,
        transport: Any = None,
    ) -> None:
        """`waiting` is told why, once for each time that the server has to be waited for."""
        import httpx2

        headers = {"user-agent": "muster-cli", "accept": "application/json"}
        self.server = server
        self.patience_seconds = patience_seconds
        self.waiting = waiting
        self._http = httpx2.Client(
            base_url=f"{server.url}/api/v1/",
            headers=headers,
            auth=self._authorised,
            timeout=httpx2.Timeout(ANSWER_SECONDS_MAX + 5.0, connect=5.0),  # `_answer` ends it before
            transport=transport,
            trust_env=not server.local,  # a proxy never knows this machine's loopback
        )
        self._answered = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        return self._ask("GET", path, params=_known(params))

    def post(self, path: str, body: Any = None, key: str | None = None, repeat: bool = True, **params: Any) -> Any:
        """Post, with an Idempotency-Key if `key` is given. Actions without one may be repeated by their nature (cancel,
        suspend, resume), or are not repeated (`repeat` False).
        """
        headers = {"idempotency-key": key} if key else {}
        return self._ask("POST", path, repeat, json=body, headers=headers, params=_known(params))

    def put(self, path: str, body: Any) -> Any:
        return self._ask("PUT", path, json=body)

    def delete(self, path: str, **params: Any) -> None:
        self._ask("DELETE", path, params=_known(params))

    def _authorised(self, request: httpx2.Request) -> httpx2.Request:
        """With a token of now: a stream that is taken up again may outlive a sign-in's first one."""
        token = token_for(self.server.url) if self.server.signed_in else self.server.token
        if token:
            request.headers["authorization"] = f"Bearer {token}"
        return request

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def job_id(self, name: str) -> str:
        """The id of the newest job of that name, or of that id. Raises CliError for none."""
        try:
            return str(uuid.UUID(name))
        except ValueError:
            pass
        found = self.get("jobs", name=name, limit=1)["items"]
        if not found:
            raise CliError(f"there is no job {name!r}", code="job_not_found", next_step="`muster ls` lists the jobs")
        return str(found[0]["id"])

    def job_pages(self, limit: int, **filters: Any) -> Iterator[list[dict[str, Any]]]:
        """The newest `limit` jobs, newest first, page by page."""
        cursor = None
        while limit > 0:
            page = self.get("jobs", limit=min(limit, PAGE_JOBS), cursor=cursor, **filters)
            yield page["items"][:limit]
            limit -= len(page["items"])
            cursor = page["nextCursor"]
            if not cursor:
                return

    def submit(self, document: Any) -> dict[str, Any]:
        job: dict[str, Any] = self.post("jobs", document, key=str(uuid.uuid4()))
        return job

    def plan(self, document: Any) -> dict[str, Any]:
        plan: dict[str, Any] = self.post("jobs", document, dryRun="true")
        return plan

    def stream(self, path: str, last_id: str = "", **params: Any) -> Iterator[httpx2.ServerSentEvent]:
        """Server-sent events until the server says `end`, over broken connections by Last-Event-ID."""
        import httpx2

        wait = httpx2.Timeout(STREAM_SILENCE_SECONDS, connect=5.0)
        pause, told, heard_at = PAUSE_SECONDS, False, time.monotonic()
        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": last_id} if last_id else {})
            try:
                with self._http.stream("GET", path, params=_known(params), headers=headers, timeout=wait) as response:
                    if response.status_code == 204:
                        return
                    self._answered = True
                    if response.status_code not in _BUSY:
                        self._raise_for(response)
                        for event in httpx2.EventSource(response):
                            last_id, pause, told = event.id or last_id, PAUSE_SECONDS, False
                            heard_at = time.monotonic()
                            yield event
                            if event.event == "end":
                                return
                reason = "the server closed the stream"
            except httpx2.TransportError as error:
                if not self._answered:
                    raise Unreachable(self.server.url, _reason(error)) from None
                reason = _reason(error)
            if time.monotonic() - heard_at > STREAM_PATIENCE_SECONDS + STREAM_SILENCE_SECONDS:
                raise Unreachable(self.server.url, reason)
            if not told:
                self.waiting(reason)
                told = True
            time.sleep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, repeat: bool = True, **arguments: Any) -> Any:
        """Ask until there is an answer, as long as patience lasts. `repeat` says whether the request may be made twice.

        A server that has never answered is not waited for: whoever has none wants to know at once.
        """
        import httpx2

        deadline = time.monotonic() + self.patience_seconds
        pause, waited = PAUSE_SECONDS, False
        while True:
            try:
                response = self._answer(lambda: self._http.request(method, path, **arguments))
            except httpx2.TransportError as error:
                refused = isinstance(error, httpx2.ConnectError) and not self._answered
                if refused or not repeat or time.monotonic() + pause > deadline:
                    raise Unreachable(self.server.url, _reason(error)) from None
                reason = _reason(error)
            else:
                self._answered = True
                if response.status_code not in _BUSY or time.monotonic() + pause > deadline:
                    self._raise_for(response)
                    return response.json() if response.content else None
                reason, pause = f"status {response.status_code}", _retry_after(response, pause)
            if not waited:
                self.waiting(reason)
                waited = True
            time.sleep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def _answer(self, request: Callable[[], httpx2.Response]) -> httpx2.Response:
        """The answer to the request. Raises Unreachable when there is none within ANSWER_SECONDS_MAX.

        In a thread, because a time-out of httpx ends a silence and not a server that sends a byte now and then.
        """
        limit = min(ANSWER_SECONDS_MAX, max(self.patience_seconds, 1.0))
        answers: queue.SimpleQueue[httpx2.Response | Exception] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(request())
            except Exception as error:  # raised again below, in the thread that asked
                answers.put(error)

        threading.Thread(target=ask, daemon=True, name="request").start()
        try:
            answer = answers.get(timeout=min(limit, SILENCE_SECONDS))
        except queue.Empty:
            if limit > SILENCE_SECONDS:
                self.waiting(f"no answer for {SILENCE_SECONDS:g} s")
            try:
                answer = answers.get(timeout=max(0.0, limit - SILENCE_SECONDS))
            except queue.Empty:
                next_step = (
                    f"`curl -m 5 {self.server.url}/healthz` says whether a Muster listens there; its log says more"
                )
                raise Unreachable(self.server.url, f"no answer within {limit:g} s", next_step) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _raise_for(self, response: httpx2.Response) -> None:
        if response.is_success:
            return
        response.read()
        raise problem_error(response.status_code, _body(response), self.server)


def problem_error(status: int, body: dict[str, Any], server: Server) -> CliError:
    """The server's problem+json as an error of ours."""
    code = str(body.get("code") or f"http-{status}")
    what = str(body.get("detail") or body.get("title") or f"{server.url} answered with status {status}")
    faults = tuple(
        Fault(Problem(str(entry.get("path", "")), str(entry.get("message", "")), entry.get("didYouMean")))
        for entry in body.get("errors") or ()
    )
    if code == "invalid_job" and faults:  # the detail repeats the first of them
        what = f"the job is not valid: {plural(len(faults), 'problem')}"
    elif code == "invalid_parameter" and faults:  # of a query: what an option says
        what, faults = "; ".join(str(fault.problem).replace("query.", "--", 1) for fault in faults), ()
    details = {"status": status} | ({"requestId": body["requestId"]} if body.get("requestId") else {})
    exit_code = Exit.UNREACHABLE if status in _BUSY else Exit.USAGE if status in (400, 413, 415, 422) else Exit.FAILED
    next_step = _next_step(status, code, body, server)
    return CliError(what, exit_code, code, faults=faults, next_step=next_step, details=details)


def _next_step(status: int, code: str, body: dict[str, Any], server: Server) -> str:
    if status == 401 and server.signed_in:
        return "`muster login` signs in anew"
    if status == 401:
        return "set MUSTER_TOKEN, or put the token into ~/.config/muster/token (mode 600)"
    if code == "job_not_found":
        return "`muster ls` lists the jobs"
    if code == "project_not_found":
        return "`muster whoami` says which projects there are for you; `--project` names another"
    if code == "name_taken":
        return "`--name` submits it under another name; `muster get` shows the one that has it"
    if status in _BUSY:
        return "try again in a moment; nothing was done"
    if status >= 500:
        request = body.get("requestId")
        return f"the server's log has the reason{f' under request {request}' if request else ''}"
    return ""


def _body(response: httpx2.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _retry_after(response: httpx2.Response, pause: float) -> float:
    """The pause that the server asks for, if it names seconds, within reason."""
    try:
        return min(max(float(response.headers.get("retry-after", "")), pause), PAUSE_SECONDS_MAX)
    except ValueError:
        return pause


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return "connection refused" if "refused" in text.lower() else text


def _known(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None and value != []}
