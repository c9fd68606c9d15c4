"""A request's body as a document, read and checked off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from muster.api.core.errors import ApiError
from muster.documents.document import Document, DocumentError
from muster.documents.reader import Format, read
from muster.words.base import DocumentProblem, InvalidDocument, M, parse

T = TypeVar("T")

YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")

# Few, for each of them takes the interpreter's lock from the event loop for up to 5 ms at a time: with two, a health
# check waits some 10 ms while the largest bodies are read; with Starlette's forty it would wait for seconds.
_READERS = ThreadPoolExecutor(2, "documents")
_INLINE_BYTES_MAX = 5_000  # reading a smaller JSON body is quicker than asking a thread for it


async def read_body(request: Request, check: Callable[[Document], T], optional: bool = False) -> T:
    """Return the result of `check` for the body, which is decoded by its content type. Both run outside the event loop.

    An empty body that is `optional` is an empty mapping. Raises ApiError: unsupported_media_type, invalid_document, and
    what `check` raises.
    """
    body = await request.body()
    if optional and not body.strip():
        return check(Document({}))
    form = _format_of(request)
    if form == "json" and len(body) < _INLINE_BYTES_MAX:
        return check(document_of(body, form))
    return await off_the_loop(lambda: check(document_of(body, form)))


def _format_of(request: Request) -> Format:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "application/json":
        return "json"
    if media_type in YAML_TYPES:
        return "yaml"
    problem = f"not {media_type[:100]!r}" if media_type else "but the request names none"
    raise ApiError("unsupported_media_type", f"The body must be application/json or application/yaml, {problem}.")


def document_of(body: bytes, form: Format) -> Document:
    """Raises ApiError invalid_document, with the place where it can't be read."""
    try:
        return read(body, form)
    except DocumentError as error:
        fault = DocumentProblem("", error.message, None, *(error.place or (None, None)))
        raise ApiError("invalid_document", f"The body can't be read: {error}.", errors=(fault,)) from None


def parsed(model: type[M], code: str, what: str) -> Callable[[Document], M]:
    """A check for `read_body`: the body as this model. Raises ApiError with that code, naming every fault."""

    def check(body: Document) -> M:
        try:
            return parse(model, body.data)
        except InvalidDocument as invalid:
            faults = tuple(body.located(fault) for fault in invalid.problems)
            raise ApiError(code, f"{what}: {faults[0]}", errors=faults) from None

    return check


async def off_the_loop(work: Callable[[], T]) -> T:
    """Run work that may take the processor for a while where it does not keep other requests waiting."""
    return await asyncio.get_running_loop().run_in_executor(_READERS, work)
