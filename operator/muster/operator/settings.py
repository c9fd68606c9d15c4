"""Settings of the operator process: from the command line, else from MUSTER_OPERATOR_*, else the defaults here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field
from pydantic_settings import SettingsConfigDict

from muster.operator.sources.settings import SourceSettings

DEFAULT_NODES = 4

Seconds = Annotated[float, Field(gt=0)]


class OperatorSettings(SourceSettings):
    """Settings of the operator of the local world."""

    model_config = SettingsConfigDict(env_prefix="MUSTER_OPERATOR_", frozen=True, extra="forbid")

    world: Literal["local"] = "local"
    state: Path = Path("~/.muster")
    # Virtual nodes. Without GPUs a node fits one worker; with GPUs, as many as they allow.
    nodes: Annotated[int, Field(ge=1, le=1_000)] = DEFAULT_NODES
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    # What runs as a worker; a JSON list in the environment.
    worker_command: tuple[str, ...] = (sys.executable, "-m", "muster.trainer.launch")
    # Names of variables that workers inherit beside those that every worker needs; a JSON list in the environment.
    worker_env: tuple[str, ...] = ()
    # The API's setting of that name: the keys of secrets; None: `<state>/secret-key`.
    secret_key_file: Annotated[
        Path | None,
        Field(validation_alias=AliasChoices("MUSTER_OPERATOR_SECRET_KEY_FILE", "MUSTER_API_SECRET_KEY_FILE")),
    ] = None
    # Files and folders that workers may read beside what they need and what their jobs name; a JSON list.
    worker_paths: tuple[str, ...] = ()
    poll_seconds: Seconds = 0.1  # between looks at heartbeats; a death is noticed at once where the system can tell
    passes_at_once: Annotated[int, Field(ge=1)] = 8
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of /metrics and /healthz; 0: any free one, told in operator.json
    log_format: Literal["auto", "console", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    parent_pid: int | None = None  # the operator ends with this process; its gangs go on
    stop_workers: bool = False  # whether SIGTERM stops the gangs too, instead of leaving them for the next start
    stop_grace_seconds: Annotated[float, Field(ge=0)] = 30.0  # that such gangs have to commit

    @property
    def folder(self) -> Path:
        """The state folder as one absolute path, so that every process spells it alike."""
        return Path(os.path.realpath(self.state.expanduser()))


def cores() -> int:
    """Processor cores that this process may use: its affinity, and the container's quota where one is set."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return max(1, allowed)
