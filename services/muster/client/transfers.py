"""Files to and from the API: uploads that go on where they were cut (tus 1.0), and downloads that do (Range).

An upload is found again by its name, size and time of change, so that another process goes on with it. What arrived is
compared with what was read: a file that changed while it was sent is refused.
"""

from __future__ import annotations

import base64
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from muster.client.answers import parsed
from muster.client.documents import project_of, source_folder
from muster.client.errors import BUSY, InvalidRequest, MusterError, NotFound, Unreachable, refusal
from muster.client.outgoing import BLOCK_BYTES, Progress, UploadSource, nobody, opened
from muster.client.source_folder import PURPOSE, SourceArchive, pack
from muster.replies.files import File, FileStatus

if TYPE_CHECKING:
    import httpx2

    from muster.client.connection import Connection

T = TypeVar("T")

# Of one request. A server's proxy may bound it, and what is cut within one is sent again from where it was cut.
REQUEST_BYTES_MAX = 1 << 30
PATIENCE_SECONDS = 60.0  # without a byte more having arrived
PAUSE_SECONDS = 1.0
SAME_NAMES_MAX = 100
FLUSH_SECONDS_MAX = 300.0  # for the server to write what it has been sent to its disk
_API = "/api/v1"
_TUS = {"tus-resumable": "1.0.0"}


class FileTransfers:
    """Transfers of files over one connection. Every method raises MusterError."""

    def __init__(self, connection: Connection) -> None:
        import httpx2

        from muster.client.wire import client_options

        self._connection = connection
        options = client_options(connection.server, None)
        self._http = httpx2.Client(**options | {"timeout": httpx2.Timeout(FLUSH_SECONDS_MAX, connect=5.0)})

    def __enter__(self) -> FileTransfers:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    # -- uploads ------------------------------------------------------------------------------------------------------

    def upload(
        self,
        path: Path,
        purpose: str,
        project: str | None = None,
        name: str | None = None,
        lifetime_seconds: float | None = None,
        progress: Progress = nobody,
    ) -> dict[str, Any]:
        """Send a file of this machine, going on with an upload of it that was cut. It is whole then, as the API shows
        it, and perhaps not yet read through."""
        with opened(path) as source:
            about = {
                "filename": name or path.name,
                "purpose": purpose,
                "stamp": source.stamp,
                **({"project": project} if project else {}),
                **({"lifetimeSeconds": str(lifetime_seconds)} if lifetime_seconds is not None else {}),
            }
            file_id = self._begun(about, source.size, project) or self._begin(about, source.size)
            self._send_all(file_id, source, progress)
            file = self._whole(file_id)
            if source.changed() or file["sha256"] != source.digest():
                self._connection.delete(f"files/{file_id}")
                what = f"{path} changed while it was sent, so that nobody knows what has arrived"
                raise InvalidRequest(what, "file-changed", next_step="upload it again when nobody writes to it")
            return file

    def send_source_of(self, document: dict[str, Any], progress: Progress = nobody) -> None:
        """Upload the folder of this machine that a job's document names as its program's source, and put the file's id
        in its place."""
        if (place := source_folder(document)) is None:
            return
        with tempfile.TemporaryDirectory(prefix="muster-source-") as into:
            archive = pack(Path(place.value).expanduser(), Path(into))
            place.holder[place.key] = self.upload_source(archive, project_of(document), progress)

    def upload_source(self, archive: SourceArchive, project: str | None = None, progress: Progress = nobody) -> str:
        """Send a program's folder and return the file's id. The same content is not sent again: the file that the
        project has of it is taken."""
        of = project or str(self._connection.get("me")["home"])
        listed = self._connection.get(
            "files", name=archive.name, purpose=PURPOSE, status="ready", project=of, limit=SAME_NAMES_MAX
        )
        for file in listed["items"]:
            # The digest decides and not the name, by which another member could have uploaded anything. What will be
            # deleted by itself may be gone before the job starts.
            if file["sha256"] == archive.sha256 and file["expiresAt"] is None:
                return str(file["id"])
        made = self.upload(archive.path, PURPOSE, of, archive.name, progress=progress)
        file = self.until_checked(made["id"])
        if file["status"] == "failed":
            raise InvalidRequest(f"{archive.name}: {file['fault']}", "bad-source", next_step="submit the job again")
        return str(file["id"])

    def until_checked(self, file_id: str, pause_seconds: float = 0.2) -> dict[str, Any]:
        """The file when it is ready or failed."""
        while True:
            file: dict[str, Any] = self._connection.get(f"files/{file_id}")
            if file["status"] in ("ready", "failed"):
                return file
            time.sleep(pause_seconds)
            pause_seconds = min(2.0, pause_seconds * 1.5)

    def _begun(self, about: dict[str, str], size: int, project: str | None) -> str | None:
        """The upload of this very file that another process has begun."""
        page = self._connection.get("files", status="uploading", name=about["filename"], project=project, limit=100)
        for file in page["items"]:
            if file["bytes"] == size and file["purpose"] == about["purpose"]:
                head = self._request("HEAD", f"files/{file['id']}")
                if head.is_success and head.headers.get("upload-metadata", "") == _metadata(about):
                    return str(file["id"])
        return None

    def _begin(self, about: dict[str, str], size: int) -> str:
        headers = {"upload-length": str(size), "upload-metadata": _metadata(about)}
        reply = self._request("POST", "files", headers)
        self._refuse(reply)
        return str(reply.json()["id"])

    def _send_all(self, file_id: str, source: UploadSource, progress: Progress) -> None:
        have, heard_at = -1, time.monotonic()
        while True:
            reason, reply = "", self._try("HEAD", file_id)
            if isinstance(reply, str):
                reason = reply
            else:
                self._refuse(reply)
                offset = int(reply.headers["upload-offset"])
                if offset > have:
                    have, heard_at = offset, time.monotonic()
                progress(have, source.size)
                if have >= source.size:
                    return
                sent = self._try("PATCH", file_id, source, offset, progress)
                if isinstance(sent, str):
                    reason = sent
                elif sent.status_code in (409, 423, *BUSY):
                    reason = f"status {sent.status_code}"
                else:
                    self._refuse(sent)
            if reason:
                if time.monotonic() - heard_at > PATIENCE_SECONDS:
                    raise Unreachable(self._connection.server.url, reason, "repeat it: it goes on where it was cut")
                self._connection.exchange.waiting(reason)
                time.sleep(PAUSE_SECONDS)

    def _try(
        self,
        method: str,
        file_id: str,
        source: UploadSource | None = None,
        offset: int = 0,
        progress: Progress = nobody,
    ) -> httpx2.Response | str:
        """The answer, or why there is none."""
        import httpx2

        headers: dict[str, str] = {}
        content = None
        if source is not None:
            count = min(REQUEST_BYTES_MAX, source.size - offset)
            headers = {
                "upload-offset": str(offset),
                "content-type": "application/offset+octet-stream",
                "content-length": str(count),
            }
            content = source.blocks(offset, count, progress)
        try:
            return self._request(method, f"files/{file_id}", headers, content)
        except httpx2.TransportError as error:
            return str(error) or type(error).__name__

    def _whole(self, file_id: str) -> dict[str, Any]:
        """The file with its digest, which the server may have to read first."""
        while True:
            file: dict[str, Any] = self._connection.get(f"files/{file_id}")
            if file["sha256"] is not None or file["status"] in ("ready", "failed"):
                return file
            time.sleep(0.2)

    # -- downloads ----------------------------------------------------------------------------------------------------

    def download(self, path: str, target: Path, size: int, progress: Progress = nobody, **params: Any) -> None:
        """Fetch what is at `path`, of `size` bytes, into a file; what an earlier try has left of it is gone on with.

        Raises InvalidRequest where a link or anything else than a file lies by the name that it has until it is whole.
        """
        import httpx2

        part = target.with_name(f"{target.name}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        heard_at = time.monotonic()
        with os.fdopen(_to_append(part), "ab") as file:
            while (have := file.tell()) < size:
                try:
                    self._fetch(path, file, have, size, progress, params)
                except (httpx2.TransportError, _NotYet) as error:
                    heard_at = time.monotonic() if file.tell() > have else heard_at
                    if time.monotonic() - heard_at > PATIENCE_SECONDS:
                        next_step = "repeat it: it goes on where it was cut"
                        raise Unreachable(self._connection.server.url, f"{error}", next_step) from None
                    self._connection.exchange.waiting(f"{error}" or type(error).__name__)
                    time.sleep(PAUSE_SECONDS)
            if have > size:
                raise MusterError(f"{part} has {have} bytes, and there are only {size}: remove it", "bad-part")
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        progress(size, size)

    def export(
        self, job_id: str, step: str | int, target: Path, progress: Progress = nobody, **form: Any
    ) -> dict[str, Any]:
        """Let the server export a checkpoint (a step, `best` or `last`), and fetch it into the folder `target`, file by
        file; an interrupted export is resumed. `form` is format, dtype and ema. Returns the API's reply."""
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InvalidRequest(f"{target} is there already", "exists", next_step="name another folder, or remove it")
        number = self._step(job_id, step)
        path = f"jobs/{job_id}/checkpoints/{number}:export"
        answer: dict[str, Any] = self._connection.get(path, **form)
        while answer["state"] == "making":
            progress(answer["done"], answer["total"])
            time.sleep(PAUSE_SECONDS)
            answer = self._connection.get(path, **form)
        # Of another model nothing is gone on with: its folder has another name.
        words = [str(value) for value in form.values()]
        unfinished = target.with_name(".".join([target.name, "unfinished", job_id[:8], str(number), *words]))
        if unfinished.is_symlink():
            raise InvalidRequest(f"{unfinished} is a link", "not-a-folder", next_step="remove it")
        arrived = 0
        for file in answer["files"]:
            place = inside(unfinished, file["path"])

            def report(done: int, _: int, before: int = arrived) -> None:
                progress(before + done, answer["total"])

            if not _is_whole(place, file["bytes"]):
                self.download(path, place, file["bytes"], report, file=file["path"], **form)
            arrived += file["bytes"]
        if target.exists():
            target.rmdir()
        unfinished.replace(target)
        return answer

    def _step(self, job_id: str, step: str | int) -> int:
        """The step of that commit: `best` is the one marked best, or the newest where none is."""
        if str(step).isdigit():
            return int(step)
        if step not in ("best", "last"):
            raise InvalidRequest(f"a step is best, last or a number, not {step!r}", "bad-step")
        listed = self._connection.get(f"jobs/{job_id}/checkpoints")
        commits = [each for each in listed["items"] if step == "best" and each["best"]] or listed["items"]
        if not commits:
            raise NotFound(listed.get("reason") or "the job has no checkpoint yet", "checkpoint_not_found")
        return max(int(each["step"]) for each in commits)

    def _fetch(self, path: str, file: Any, have: int, size: int, progress: Progress, params: dict[str, Any]) -> None:
        headers = self._headers() | {"accept": "*/*"} | ({"range": f"bytes={have}-"} if have else {})
        with self._http.stream("GET", f"{_API}/{path}", params=params, headers=headers) as reply:
            if reply.status_code in (202, *BUSY):
                raise _NotYet(f"status {reply.status_code}")
            if not reply.is_success:
                reply.read()
                self._refuse(reply)
            if have and reply.status_code != 206:
                file.truncate(0)
                have = 0
            for block in reply.iter_bytes(BLOCK_BYTES):
                file.write(block)
                have += len(block)
                progress(have, size)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _headers(self) -> dict[str, str]:
        token = self._connection.exchange.token()
        return {"authorization": f"Bearer {token}"} if token else {}

    def _request(
        self, method: str, path: str, headers: dict[str, str] | None = None, content: Iterator[bytes] | None = None
    ) -> httpx2.Response:
        return self._http.request(
            method, f"{_API}/{path}", headers=self._headers() | _TUS | (headers or {}), content=content
        )

    def _refuse(self, reply: httpx2.Response) -> None:
        if reply.is_success:
            return
        try:
            body = reply.json()
        except ValueError:  # a HEAD has no body
            body = {}
        if reply.status_code == 404 and not body:
            raise NotFound("the upload is not there any more", "file_not_found", next_step="begin it anew")
        server = self._connection.server
        raise refusal(reply.status_code, body if isinstance(body, dict) else {}, server.url, server.signed_in)


def take_in(
    transfers: FileTransfers,
    path: Path,
    purpose: str,
    project: str | None,
    name: str | None,
    lifetime_seconds: float | None,
    progress: Progress,
) -> File:
    """The file once it is sent and read through. Raises InvalidRequest where nothing can be learnt from it."""
    made = transfers.upload(path, purpose, project, name, lifetime_seconds, progress)
    file = parsed(File, transfers.until_checked(str(made["id"])))
    if file.status == FileStatus.FAILED:
        what = f"{path}: nothing can be learnt from it: {file.fault}"
        raise InvalidRequest(
            what, "file-failed", next_step="mend the file and upload it again", details={"id": file.id}
        )
    return file


def transferred(connection: Connection, work: Callable[[FileTransfers, Progress], T], progress: Progress) -> T:
    """Run `work` with transfers of the same server, which end with it."""
    with FileTransfers(connection) as transfers:
        return work(transfers, progress)


def bring(transfers: FileTransfers, file_id: str, target: Path, progress: Progress) -> Path:
    """Write a file of the server to `target`, and return that."""
    file = transfers._connection.get(f"files/{file_id}")
    transfers.download(f"files/{file_id}/content", target, file["bytes"], progress)
    return target


class _NotYet(Exception):
    """The server has it not yet."""


def inside(folder: Path, name: str) -> Path:
    """Return the local path of a file that a server names. Raises MusterError for a name outside of the folder."""
    named = PurePosixPath(name)
    if named.is_absolute() or not named.parts or ".." in named.parts or not name.isprintable():
        raise MusterError(f"the server names a file {name[:100]!r}, which would lie outside of {folder}", "bad-answer")
    return folder / named


def _to_append(path: Path) -> int:
    """A descriptor of the file, through no link: its name can be foretold, and the folder may be others' too."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise InvalidRequest(f"{path} is no regular file", "not-a-file", next_step="remove it") from None


def _is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _metadata(about: dict[str, str]) -> str:
    return ",".join(f"{key} {base64.b64encode(value.encode()).decode()}" for key, value in about.items())
