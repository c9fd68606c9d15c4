"""Paths in the state folder of `muster up`, which the API, the operator and the CLI share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from muster.words.names import FIRST_INCARNATION

# The names that State.attempt and State.worker give to folders.
ATTEMPT_FOLDER = re.compile(r"attempt-(\d{1,9})", re.ASCII)
WORKER_FOLDER = re.compile(r"worker-(\d{1,9})(?:-i(\d{1,9}))?", re.ASCII)  # the incarnation from the second on


@dataclass(frozen=True)
class StateFolder:
    """The state folder of one machine."""

    root: Path  # `muster up --state`, by default ~/.muster

    @property
    def cluster(self) -> Path:
        """TrainingJobs (cluster.LocalCluster)."""
        return self.root / "cluster.db"

    @property
    def database(self) -> Path:
        """The API's rows, where no other database is set."""
        return self.root / "muster.db"

    @property
    def admin_token(self) -> Path:
        """An API token with the scope admin, for the user of this machine alone (0600)."""
        return self.root / "admin-token"

    @property
    def secret_key(self) -> Path:
        """The keys that open the secrets in `cluster` (secrets.box.SecretBox, 0600)."""
        return self.root / "secret-key"

    @property
    def operator(self) -> Path:
        """File of the running operator: JSON {pid, startedAt, url, nodes, gpusPerNode}, locked (flock) while it
        lives."""
        return self.root / "operator.json"

    @property
    def webhook_token(self) -> Path:
        """Token file for posting to the operator's server, where no other file is set (mode 0600)."""
        return self.root / "webhook-token"

    @property
    def base_models(self) -> Path:
        """The base models that `muster models add` has mapped (muster.words.model_map)."""
        return self.root / "base-models.yaml"

    @property
    def checkpoints(self) -> Path:
        """The default checkpoint address, as a folder."""
        return self.root / "checkpoints"

    @property
    def cache(self) -> Path:
        """Prepared token stores, shared by all jobs."""
        return self.root / "cache"

    @property
    def files(self) -> Path:
        """The uploaded files that are whole: a folder per project (storage.contents.Contents), where no other place is
        set."""
        return self.root / "files"

    @property
    def uploads(self) -> Path:
        """Return the folder of uploads in progress, which nobody reads yet."""
        return self.root / "uploads"

    @property
    def exports(self) -> Path:
        """Models that the API made of commits, kept for a while for whoever fetches them."""
        return self.root / "exports"

    @property
    def logs(self) -> Path:
        """Logs of the platform's own processes: api.log, operator.log."""
        return self.root / "logs"

    @property
    def running(self) -> Path:
        """File of the running platform: JSON {pid, url}, locked (flock) while `muster up` lives."""
        return self.root / "up.json"

    @property
    def notices(self) -> Path:
        """Folder of the virtual nodes' notices (notices.NodeNotices), as <node>.json."""
        return self.root / "notices"

    @property
    def jobs(self) -> Path:
        """A folder per job, named by its uid."""
        return self.root / "jobs"

    def attempt(self, uid: str, attempt: int) -> Path:
        return self.jobs / uid / f"attempt-{attempt}"

    def worker(self, uid: str, attempt: int, worker: int, incarnation: int = FIRST_INCARNATION) -> Path:
        """MUSTER_WORKER_DIR: log, steps.jsonl, heartbeats, exit record. Kept after the process ends."""
        first = f"worker-{worker}"
        return self.attempt(uid, attempt) / (first if incarnation == FIRST_INCARNATION else f"{first}-i{incarnation}")
