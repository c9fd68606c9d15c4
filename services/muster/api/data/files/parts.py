"""An upload in parts: begun, any number of parts kept in no order, and joined in the order that its sender says."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from muster.api.core.callers import Principal
from muster.api.core.database.tables import FileRow
from muster.api.core.errors import ApiError, invalid_parameter
from muster.api.core.services import Services
from muster.api.data.files import service
from muster.api.data.files.arrivals import FilePlaces
from muster.api.data.files.service import Chunks, NewFile
from muster.replies.files import FileStatus

# A part may come again whose reply was lost, as often as OpenAI's client tries: what comes more often fills the disk.
TRIES: Final = 3


async def begin(services: Services, caller: Principal, new: NewFile) -> FileRow:
    """Create an upload of a known size that comes in parts. Raises ApiError as `service.create` does."""
    assert new.bytes is not None, "parts add up to something"
    # The parts, and the whole that is made of them before they go.
    return await service.begin(services, caller, new, new.bytes, service.UPLOAD_SECONDS, needs=2 * new.bytes)


async def add(services: Services, caller: Principal, file_id: str, chunks: Chunks) -> str:
    """Keep a part of an upload, in no order as yet; returns what it is called. Raises ApiError file_not_found,
    forbidden, upload_conflict, file_too_large, no_space."""
    row = await service.find(services, caller, file_id, act=True)
    if row.status != FileStatus.UPLOADING:
        raise ApiError("upload_conflict", f"All of {row.id} has arrived.")
    staging, part = services[FilePlaces].staging, secrets.token_hex(12)
    there = await asyncio.to_thread(staging.parts, row.id)
    left = TRIES * row.bytes - sum(there.values())
    name = staging.part(row.id, part)
    try:
        staging.make(name)
        if not await staging.write(name, 0, chunks, min(row.bytes, max(0, left))):
            raise service.empty()
    except BaseException:
        staging.remove(name)
        raise
    return part


async def join(services: Services, caller: Principal, file_id: str, parts: Sequence[str], md5: str | None) -> FileRow:
    """Make the file of its parts, in this order. Of an upload that is a file already it is that file, so that this may
    be repeated. Raises ApiError file_not_found, forbidden, checksum_mismatch, no_space, and invalid_parameter for
    `parts` that are none of this upload or do not add up to what was announced."""
    row = await service.find(services, caller, file_id, act=True)
    if row.status != FileStatus.UPLOADING:
        return row
    staging, spool = services[FilePlaces].staging, service.new_spool()
    names = [staging.part(row.id, part) for part in parts]
    try:
        _refuse(await asyncio.to_thread(staging.parts, row.id), parts, row.bytes)
        digest = await asyncio.to_thread(staging.join, spool, names, "md5")
        if md5 is not None and md5.lower() != digest:
            raise ApiError("checksum_mismatch", f"The parts have the MD5 {digest}, and {md5[:80]!r} was announced.")
        row = await service.arrived(services, caller, row.id, spool=spool)
    except ApiError:
        again = await service.find(services, caller, file_id, act=True)
        if again.status != FileStatus.UPLOADING:
            return again  # another request has joined them meanwhile
        raise
    finally:
        staging.remove(spool)
    for name in names:
        staging.remove(name)
    return row


def _refuse(there: Mapping[str, int], parts: Sequence[str], announced: int) -> None:
    """Raises ApiError invalid_parameter."""
    if missing := [part for part in parts if part not in there]:
        raise invalid_parameter("parts", f"{missing[0][:80]!r} is no part of this upload")
    if (total := sum(there[part] for part in parts)) != announced:
        raise invalid_parameter("parts", f"have {total:,} bytes together, and {announced:,} were announced")
