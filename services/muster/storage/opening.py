"""Opening of stores: the one place that knows which kind of store an address has.

The kinds import the protocol (`store.py`), and this module imports a kind when an address asks for it: what reads a
folder needs no TLS and no S3.
"""

from __future__ import annotations

from muster.storage.settings import S3Settings
from muster.storage.store import ReadOnlyStore, Store
from muster.words.address import AddressError, StorageAddress, parse_address


def open_source(address: StorageAddress, settings: S3Settings | None = None) -> ReadOnlyStore:
    """Open an address for reading, S3 by `settings` or those of the environment; the web is waited for as long as
    they say. Raises AddressError where nothing can."""
    if address.scheme == "https":
        from muster.storage.web_store import WebStore, patient_as

        return WebStore(address) if settings is None else patient_as(settings, address)
    return open_store(address, settings)


def open_store(place: str | StorageAddress, settings: S3Settings | None = None, links: bool = True) -> Store:
    """The store of a folder: a `file://` or `s3://` address, or a plain path. Raises AddressError for any other.

    S3 is reached by `settings`, or by those of the environment. `links` as for FileStore.
    """
    address = parse_address(place) if isinstance(place, str) else place
    if address.scheme == "file":
        from muster.storage.file_store import FileStore

        return FileStore(address.local.absolute(), links)
    if address.scheme == "s3":
        from muster.storage.s3_store import S3Store

        return S3Store(address, settings)
    raise AddressError(f"{address}: is no folder; Muster keeps folders under file:///folder and s3://bucket/folder")
