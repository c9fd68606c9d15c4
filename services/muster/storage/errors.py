"""Errors of storage. The message names the place and the next step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from muster.words.base import UserError


class StorageError(Exception):
    """Checkpoint or data storage failed: full, not writable, unreachable, or its bytes did not verify."""


class StoreError(StorageError):
    """Storage refused or failed, also after the store's own retries."""


class NotFound(StoreError):
    """Error for an object that does not exist."""


class TruncatedObject(StoreError):
    """An object ends before the bytes that were asked for."""


class UnfitObject(StoreError):
    """Error for something that exists and can't be an object of Muster's."""


class NotAFile(UnfitObject):
    """A FIFO, a device, a folder or a link that leads nowhere."""


class TooLarge(UnfitObject):
    """Larger than the caller is ready to read."""


class ReplacedObject(StoreError):
    """The object is not the one any more that was listed."""


class StoreRefusal(StoreError):
    """Error that lasts until a person changes something: there is no such bucket, access is denied, a name of the
    address is wrong. A plain StoreError is for what may succeed in another attempt, on another node."""


@contextlib.contextmanager
def final_errors_are_the_users(place: str = "") -> Iterator[None]:
    """Raise UserError, at `place` of the document, for what a store refuses for good or does not have: whoever
    submitted the job has to change something."""
    try:
        yield
    except (NotFound, StoreRefusal, ReplacedObject) as error:
        raise UserError(f"{place}: {error}" if place else str(error)) from error
