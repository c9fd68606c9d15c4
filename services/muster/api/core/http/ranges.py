"""A reply of many bytes, or the part of it that `Range` asks for (RFC 9110, section 14)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import StreamingResponse

from muster.api.core.errors import ApiError

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")

Read = Callable[[int, int], Awaitable[AsyncIterator[bytes]]]  # bytes [start, stop) in order


async def ranged(
    request: Request, read: Read, size: int, tag: str, name: str, media_type: str = "application/octet-stream"
) -> StreamingResponse:
    """The bytes that the request asks for, of `size`, as a file of that name. `tag` changes whenever they do. Raises
    ApiError range_unsatisfiable, and what `read` raises before the first byte."""
    part = _requested_range(request, size, tag)
    start, stop = part or (0, size)
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Length": str(stop - start),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}",
        "ETag": f'"{tag}"',
    }
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    blocks = await read(start, stop)
    return StreamingResponse(blocks, 206 if part is not None else 200, headers, media_type)


def _requested_range(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """[start, stop); None for all of it: where nothing, several parts, or a part of something older is asked for."""
    condition = request.headers.get("if-range")
    match = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if match is None or match[0] == "bytes=-" or condition not in (None, f'"{tag}"'):
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        words = f"There are {size} bytes, and {match[0]} is none of them."
        raise ApiError("range_unsatisfiable", words, headers={"Content-Range": f"bytes */{size}"})
    return start, stop
