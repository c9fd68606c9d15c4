"""The source folder that a job's document names: packed before anybody is asked, uploaded before the job is sent."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.cli import formatting
from muster.cli.errors import CliError, ExitStatus
from muster.cli.output import say
from muster.client.documents import source_folder
from muster.client.source_folder import SourceArchive, pack
from muster.words.base import DocumentProblem

if TYPE_CHECKING:
    from muster.cli.job_file import JobFile
    from muster.cli.options import JobsClient

NAMES_MAX = 5


@dataclass(frozen=True)
class PackedSource:
    """An archive that is to be named in the `program` of a document."""

    archive: SourceArchive
    folder: Path
    program: dict[str, Any]

    def show(self) -> None:
        files, size = formatting.plural(self.archive.files, "file"), self.archive.path.stat().st_size
        say(f"source      {self.folder}: {files}, {formatting.size(size)} packed")
        if self.archive.left_out:
            say(f"            without {_listed(self.archive.left_out)}", "dim")
        if self.archive.secrets:
            names = _listed(self.archive.secrets)
            what = f"{names} may hold secrets, which everybody in the project could read"
            say(f"warning: {what}; name them in .gitignore and use `muster secrets`", "yellow")

    def upload(self, client: JobsClient, project: str | None) -> None:
        """Upload the archive, unless the project has it, and name it in the document. Raises MusterError."""
        from muster.cli.files import api
        from muster.cli.uploading import transfer_progress
        from muster.client.transfers import FileTransfers

        with FileTransfers(api(client)) as transfers, transfer_progress(self.archive.name) as progress:
            self.program["source"] = transfers.upload_source(self.archive, project, progress)


def _listed(paths: Sequence[str]) -> str:
    more = len(paths) - NAMES_MAX
    return ", ".join(paths[:NAMES_MAX]) + (f" and {more:,} more" if more > 0 else "")


@contextlib.contextmanager
def packed_source(file: JobFile, client: JobsClient) -> Iterator[PackedSource | None]:
    """Pack the folder that the document names, and take its name out: to the server it means nothing. None for a
    document that names no folder. Raises CliError with its place, for a cluster as well, which keeps no files."""
    from muster.client.connection import Connection

    place = source_folder(file.data)
    if place is None:
        yield None
        return
    if not isinstance(client, Connection):
        words = f"{place.value!r} would have to be uploaded, and a cluster keeps no files"
        fault = file.fault(DocumentProblem(place.path, words))
        next_step = "leave --context out, or name an archive that the workers can read: s3://bucket/source.tar.gz"
        raise CliError(
            "a source folder goes through the API", ExitStatus.USAGE, "no-files", file.name, (fault,), next_step
        )
    folder = file.folder / Path(place.value).expanduser()
    with tempfile.TemporaryDirectory(prefix="muster-source-") as into:
        archive = pack(folder, Path(into))
        del place.holder[place.key]
        yield PackedSource(archive, folder, place.holder)
