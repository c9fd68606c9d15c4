"""The places that a model's folder may lie in: all that storage reads, and the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from muster.storage.errors import NotFound, StorageError, TruncatedObject
from muster.storage.model_folder import FolderFiles
from muster.storage.opening import open_source, open_store
from muster.storage.store import StoredObject
from muster.trainer.errors import UserError
from muster.words.address import StorageAddress, hub_path, parse_address

SECONDS_MAX = 60.0  # without a byte
TRIES = 4


def open_files(source: str) -> FolderFiles:
    """The folder at an address. Raises UserError where it can't be read by anybody, StorageError where not now."""
    address = parse_address(source)
    return _hub_folder(source, address) if address.scheme == "hf" else open_source(address)


@dataclass(frozen=True)
class HubFolder:
    """Files of one revision of a repository of the Hugging Face hub, read by ranged requests."""

    uri: str  # the address as the user wrote it, for messages
    base: str  # the URL that file names are appended to
    headers: dict[str, str]  # sent with every request, with the user's token where there is one
    revision: str | None  # its hash; None where the hub does not say it
    names: tuple[str, ...] = ()  # of its files, below the folder

    @cached_property
    def _client(self) -> Any:
        import httpx2  # huggingface_hub's own client; on a redirect to another host it keeps the token to itself

        return httpx2.Client(follow_redirects=True, timeout=SECONDS_MAX, headers=self.headers)

    def read(self, key: str) -> bytes:
        content: bytes = self._get(key, {}).content
        return content

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        if not len(into):
            return
        answer = self._get(key, {"Range": f"bytes={start}-{start + len(into) - 1}"})
        if answer.status_code != 206:
            raise UserError(f"{self.uri}: the hub gives no parts of files; copy the folder to s3:// or file://")
        if len(answer.content) < len(into):
            raise TruncatedObject(f"{self.uri}: {key} ends before byte {start + len(into)}")
        into[:] = answer.content

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        return (StoredObject(name, 0, 0.0, self.revision or "") for name in self.names if name.startswith(prefix))

    def _get(self, key: str, headers: dict[str, str]) -> Any:
        import httpx2

        error = ""
        for _ in range(TRIES):
            try:
                answer = self._client.get(f"{self.base}/{key}", headers=headers)
            except httpx2.TransportError as found:
                error = str(found) or type(found).__name__
                continue
            if answer.status_code < 300:
                return answer
            if answer.status_code == 404:
                raise NotFound(f"{self.uri}: there is no {key}")
            if answer.status_code == 416:
                raise TruncatedObject(f"{self.uri}: {key} ends before {headers['Range']}")
            if answer.status_code in (401, 403):
                raise UserError(f"{self.uri}: {key} is refused ({answer.status_code}); {ACCESS}")
            error = f"the server answers {answer.status_code}"
        raise StorageError(f"{self.uri}: {key} can't be read: {error}")


ACCESS = "accept the model's terms on its page, and give the job a token that may read it (HF_TOKEN, from a secret)"


def _hub_folder(source: str, address: StorageAddress) -> FolderFiles:
    """The revision is resolved to a hash once, so that every file is of the same one. HF_ENDPOINT names a mirror; with
    HF_HUB_OFFLINE the cache of earlier downloads is all there is."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import build_hf_headers

    where = hub_path(address)
    if where.kind not in (None, "models"):
        raise UserError(f"model.source {source}: names {where.kind}, not a model; write hf://organisation/name")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        try:
            return open_store(snapshot_download(where.repository, revision=where.revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise UserError(
                f"model.source {source}: HF_HUB_OFFLINE is set, and the cache does not hold it; download it first, or "
                "unset HF_HUB_OFFLINE"
            ) from None
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        info = HfApi(endpoint=endpoint).model_info(where.repository, revision=where.revision)
    except GatedRepoError:
        raise UserError(f"model.source {source}: the model is gated; {ACCESS}") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"model.source {source}: the hub has no such model, or shows it to members alone; check the name, or "
            f"{ACCESS}"
        ) from None
    except RevisionNotFoundError:
        raise UserError(
            f"model.source {source}: has no revision {where.revision!r}; name a branch, tag or hash"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise StorageError(f"model.source {source}: the hub can't be asked: {error}") from error
    path = f"/{where.path.strip('/')}" if where.path else ""
    below = f"{path}/".lstrip("/")
    files = [each.rfilename for each in info.siblings or ()]
    names = tuple(name.removeprefix(below) for name in files if name.startswith(below))
    url = f"{endpoint}/{where.repository}/resolve/{info.sha}{path}"
    return HubFolder(source, url, build_hf_headers(), info.sha, names)
