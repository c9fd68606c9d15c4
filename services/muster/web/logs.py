"""`/jobs/{id}/logs`: what a worker wrote, a page of it at a time, with a search through all of it and the whole file.

A log of a gigabyte is read in pages of 200 kB: neither this process nor the browser ever holds more of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as File
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from muster.web import api
from muster.web.api import ApiError, Logs, ServicesDependency
from muster.web.job import JobId, show
from muster.web.log_lines import in_words
from muster.web.session import Visitor

router = APIRouter(prefix="/jobs/{job_id}/logs", include_in_schema=False)

PAGE_BYTES = 200_000  # some 2,000 lines
TAIL_LINES = 500
SEARCH_BYTES = 256 << 20  # of one request: a second's work at most; the next one goes on from there
_CHUNK_BYTES = 4 << 20
_Number = Annotated[int | None, Query(ge=1, le=10**9)]
_Worker = Annotated[int, Query(ge=0, le=10**9)]
_Offset = Annotated[int | None, Query(ge=0, le=2**53)]


@dataclass(frozen=True)
class Found:
    """Where a search came to: `at` is the beginning of the line with the hit, `until` how far it has read."""

    at: int | None
    until: int
    at_end: bool


@router.get("")
async def show_logs(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    job_id: JobId,
    attempt: _Number = None,
    worker: _Worker = 0,
    offset: _Offset = None,
    find: Annotated[str, Query(max_length=200)] = "",
    since: Annotated[int, Query(ge=0, le=2**53)] = 0,
    raw: bool = False,
) -> Response:
    """The end of the log; or the page at `offset`; or that of the first line after `since` that holds `find`. Step
    records are shown in words, or `raw` as they were written."""
    row = await api.find(services, visitor, job_id)
    logs = await api.fetch_log(services, job_id, attempt, worker)
    attempts = await run_in_threadpool(logs.attempts)
    chosen = attempt or (attempts[-1] if attempts else None)
    workers = await run_in_threadpool(logs.workers, chosen) if chosen else []
    here: dict[str, Any] = {"attempts": attempts, "attempt": chosen, "workers": workers, "worker": worker, "find": find}
    here["raw"] = raw
    if chosen is None or worker not in workers:
        return await show(request, services, visitor, row, "logs", **here, text=None, found=None)
    file = logs.file(chosen, worker)
    found = await run_in_threadpool(search, file, find, since) if find else None
    if offset is None and found is not None:
        offset = found.at
    start = await run_in_threadpool(api.tail_offset, file, TAIL_LINES) if offset is None else offset
    read = await run_in_threadpool(api.page, file, start, PAGE_BYTES)
    return await show(
        request,
        services,
        visitor,
        row,
        "logs",
        **here,
        text=read.text if raw else in_words(read.text),
        found=found,
        begins=read.offset,
        ends=read.next_offset,
        at_end=read.at_end,
        earlier=await run_in_threadpool(line_before, file, read.offset) if read.offset else None,
        follows=row.live and chosen == attempts[-1] and read.at_end,
    )


@router.get("/lines")
async def follow_log(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    job_id: JobId,
    attempt: _Number = None,
    worker: _Worker = 0,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    raw: bool = False,
) -> Response:
    """What was added since `offset`, for a page that follows the log."""
    reply = await api.read_logs(request, services, visitor, job_id, attempt, str(worker), None, offset)
    read = api.document_of(reply)
    text = read["text"] if raw else in_words(read["text"])
    told = {"text": text, "nextOffset": read["nextOffset"], "complete": read["complete"]}
    return JSONResponse(told, headers={"Cache-Control": "no-store"})


@router.get("/download")
async def download(
    services: ServicesDependency, visitor: Visitor, job_id: JobId, attempt: _Number = None, worker: _Worker = 0
) -> Response:
    """The whole log, as a file."""
    row = await api.find(services, visitor, job_id)
    logs = await api.fetch_log(services, job_id, attempt, worker)
    attempts = await run_in_threadpool(logs.attempts)
    chosen = attempt or (attempts[-1] if attempts else 0)
    if worker not in await run_in_threadpool(logs.workers, chosen):
        raise ApiError("log_not_found", f"Job {row.name!r} has no log of attempt {chosen}, worker {worker}.")
    name = f"{row.name}-attempt-{chosen}-worker-{worker}.log"
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return StreamingResponse(_pieces(logs, chosen, worker), media_type="text/plain; charset=utf-8", headers=headers)


def _pieces(logs: Logs, attempt: int, worker: int) -> Iterator[bytes]:
    file, offset = logs.file(attempt, worker), 0
    while True:
        read = api.page(file, offset)
        yield read.text.encode()
        if read.at_end or read.next_offset == offset:
            return
        offset = read.next_offset


def line_before(file: File, offset: int) -> int:
    """Where a page that ends about here begins: with a line, a page earlier."""
    start = max(0, offset - PAGE_BYTES)
    if start == 0:
        return 0
    with api.reading(file) as handle:
        handle.seek(start)
        return min(offset - 1, start + len(handle.readline(PAGE_BYTES)))


def search(file: File, text: str, since: int) -> Found:
    """The first line from `since` on that holds the text, in any case of ASCII letters."""
    wanted = text.lower().encode()
    at, carried = since, b""  # carried: the end of the chunk before, where a hit may begin
    try:
        handle = api.reading(file)
    except FileNotFoundError:
        return Found(None, since, True)
    with handle:
        handle.seek(since)
        while at - since < SEARCH_BYTES:
            raw = handle.read(_CHUNK_BYTES)
            if not raw:
                return Found(None, at, True)
            looked = carried + raw
            hit = looked.lower().find(wanted)
            if hit >= 0:
                return Found(_line_start(handle, at - len(carried) + hit), at, False)
            at += len(raw)
            carried = looked[-len(wanted) :]
    return Found(None, at, False)


def _line_start(handle: BinaryIO, hit: int) -> int:
    """Where the line of the hit begins, looking back no further than a page."""
    start = max(0, hit - PAGE_BYTES // 2)
    handle.seek(start)
    before: bytes = handle.read(hit - start)
    cut = before.rfind(b"\n") + 1
    return start + cut if cut or start == 0 else hit
