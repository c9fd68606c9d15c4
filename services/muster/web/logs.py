"""`/jobs/{id}/logs`: what a worker wrote, a page of it at a time, with a search through all of it and the whole file.

A log of a gigabyte is read in pages of 200 kB: neither this process nor the browser ever holds more of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as File
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BeforeValidator, Field
from starlette.concurrency import run_in_threadpool

from muster.web import api
from muster.web.api import ApiError, JobLogs, JobRow, Services, ServicesDependency
from muster.web.job import JobId, show
from muster.web.session import Visitor
from muster.words.gang import ranks_per_node
from muster.words.log_words import in_words
from muster.words.names import rank_mark

router = APIRouter(prefix="/jobs/{job_id}/logs", include_in_schema=False)

PAGE_BYTES = 200_000  # some 2,000 lines
TAIL_LINES = 500
SEARCH_BYTES = 256 << 20  # of one request: a second's work at most; the next one goes on from there
_CHUNK_BYTES = 4 << 20
_ANY_RANK = re.compile(re.escape(rank_mark(0)).replace("0", "[0-9]+"))
_BLANK = BeforeValidator(lambda given: given or None)  # a form sends a choice of nothing so
_Number = Annotated[Annotated[int, Field(ge=1, le=10**9)] | None, _BLANK, Query()]
_Worker = Annotated[int, Query(ge=0, le=10**9)]
_Rank = Annotated[Annotated[int, Field(ge=0, le=10**9)] | None, _BLANK, Query()]
_Offset = Annotated[int | None, Query(ge=0, le=2**53)]


@dataclass(frozen=True)
class SearchProgress:
    """Progress of a search: `at` is the start of the line with the hit, `until` the offset that was read up to."""

    at: int | None
    until: int
    at_end: bool


@dataclass(frozen=True)
class ChosenLog:
    """The logs that a job has, and the one that is asked for; `attempt` is 0 before the first."""

    logs: JobLogs
    attempts: list[int]
    attempt: int
    workers: list[int]
    worker: int

    @property
    def exists(self) -> bool:
        return self.worker in self.workers

    @property
    def file(self) -> File:
        return self.logs.file(self.attempt, self.worker)


async def choose(services: Services, job_id: str, attempt: int | None, worker: int) -> ChosenLog:
    """Return the chosen log; without an attempt, that of the newest one."""
    logs = await api.fetch_log(services, job_id, attempt, worker)
    attempts = await run_in_threadpool(logs.attempts)
    number = attempt or (attempts[-1] if attempts else 0)
    workers = await run_in_threadpool(logs.workers, number) if number else []
    return ChosenLog(logs, attempts, number, workers, worker)


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
    rank: _Rank = None,
) -> Response:
    """The end of the log; or the page at `offset`; or that of the first line after `since` that holds `find`. All of
    it or one rank's lines; step records in words, or `raw` as they were written."""
    row = await api.find(services, visitor, job_id)
    chosen = await choose(services, job_id, attempt, worker)
    here: dict[str, Any] = {"chosen": chosen, "ranks": ranks_of(row, worker), "rank": rank, "find": find, "raw": raw}
    if not chosen.exists:
        return await show(request, services, visitor, row, "logs", **here, text=None, match=None)
    file = chosen.file
    match = await run_in_threadpool(search, file, find, since) if find else None
    if offset is None and match is not None:
        offset = match.at
    start = await run_in_threadpool(api.tail_offset, file, TAIL_LINES, api.PAGE_BYTES_MAX) if offset is None else offset
    read = await run_in_threadpool(api.page, file, start, PAGE_BYTES)
    return await show(
        request,
        services,
        visitor,
        row,
        "logs",
        **here,
        text=log_text(read.text, row, worker, rank, raw),
        match=match,
        begins=read.offset,
        ends=read.next_offset,
        at_end=read.at_end,
        earlier=await run_in_threadpool(line_before, file, read.offset) if read.offset else None,
        follows=row.live and chosen.attempt == chosen.attempts[-1] and read.at_end,
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
    rank: _Rank = None,
) -> Response:
    """Return the text added since `offset`, for a page that follows the log."""
    row = await api.find(services, visitor, job_id)
    reply = await api.read_logs(request, services, visitor, job_id, attempt, str(worker), None, offset)
    read = api.document_of(reply)
    text = log_text(read["text"], row, worker, rank, raw)
    answer = {"text": text, "nextOffset": read["nextOffset"], "complete": read["complete"]}
    return JSONResponse(answer, headers={"Cache-Control": "no-store"})


@router.get("/download")
async def download(
    services: ServicesDependency, visitor: Visitor, job_id: JobId, attempt: _Number = None, worker: _Worker = 0
) -> Response:
    """The whole log, as a file."""
    row = await api.find(services, visitor, job_id)
    chosen = await choose(services, job_id, attempt, worker)
    if not chosen.exists:
        raise ApiError("log_not_found", f"Job {row.name!r} has no log of attempt {chosen.attempt}, worker {worker}.")
    name = f"{row.name}-attempt-{chosen.attempt}-worker-{worker}.log"
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return StreamingResponse(_pieces(chosen.file), media_type="text/plain; charset=utf-8", headers=headers)


def _pieces(file: File) -> Iterator[bytes]:
    offset = 0
    while True:
        read = api.page(file, offset)
        yield read.text.encode()
        if read.at_end or read.next_offset == offset:
            return
        offset = read.next_offset


def ranks_of(row: JobRow, worker: int) -> range:
    """Return the ranks that write to the worker's log."""
    count = ranks_per_node(row.spec)
    return range(worker * count, (worker + 1) * count)


def log_text(text: str, row: JobRow, worker: int, rank: int | None, raw: bool) -> str:
    ranks = ranks_of(row, worker)
    if rank is not None and rank in ranks:
        text = of_rank(text, rank, ranks[0])
    return text if raw else in_words(text)


def line_before(file: File, offset: int) -> int:
    """Return the start of the page that ends about here: the beginning of a line, one page earlier."""
    start = max(0, offset - PAGE_BYTES)
    if start == 0:
        return 0
    with api.reading(file) as handle:
        handle.seek(start)
        return min(offset - 1, start + len(handle.readline(PAGE_BYTES)))


def search(file: File, text: str, since: int) -> SearchProgress:
    """The first line from `since` on that holds the text, in any case of ASCII letters."""
    needle = text.lower().encode()
    at, carried = since, b""  # carried: the end of the chunk before, where a hit may begin
    try:
        handle = api.reading(file)
    except FileNotFoundError:
        return SearchProgress(None, since, True)
    with handle:
        handle.seek(since)
        while at - since < SEARCH_BYTES:
            raw = handle.read(_CHUNK_BYTES)
            if not raw:
                return SearchProgress(None, at, True)
            looked = carried + raw
            hit = looked.lower().find(needle)
            if hit >= 0:
                return SearchProgress(_line_start(handle, at - len(carried) + hit), at, False)
            at += len(raw)
            carried = looked[-len(needle) :]
    return SearchProgress(None, at, False)


def _line_start(handle: BinaryIO, hit: int) -> int:
    """Return the start of the line with the hit, looking back no further than one page."""
    start = max(0, hit - PAGE_BYTES // 2)
    handle.seek(start)
    before: bytes = handle.read(hit - start)
    cut = before.rfind(b"\n") + 1
    return start + cut if cut or start == 0 else hit


def of_rank(text: str, rank: int, first_rank: int) -> str:
    """The lines of one of a worker's ranks, without its mark. Those without any are its first rank's or launcher's."""
    lines, mark = text.split("\n"), rank_mark(rank)
    if rank == first_rank:
        return "\n".join(line for line in lines if not _ANY_RANK.match(line))
    chosen = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    return "\n".join([*chosen, ""] if chosen else [])
