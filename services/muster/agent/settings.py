"""Settings of the agent: from the command line, else from MUSTER_AGENT_*, else the defaults here."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from muster.kube.connection import SERVICE_ACCOUNT
from muster.words.notices import AGENT_PORT

PREFIX = "MUSTER_AGENT_"


class Settings(BaseModel):
    """Settings of one agent: what it watches and where it reports."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]  # its name in the cluster
    host: str = "0.0.0.0"  # noqa: S104 - the node's workers are in networks of their own
    port: Annotated[int, Field(ge=0, le=65535)] = AGENT_PORT
    folder: Path | None = None  # where the notices are also written, to <node>.json
    kernel_log: Path = Path("/dev/kmsg")
    xid_table: Path | None = None
    imds: str = "http://169.254.169.254"  # the instance metadata service; an empty one is not asked
    sysfs: Path = Path("/sys")
    # A path on each file system to watch; in a pod, /tmp is a volume on the disk that the workers fill.
    disks: tuple[Path, ...] = (Path("/tmp"),)  # noqa: S108
    kubernetes: bool = False  # whether the notices are written to the Node object
    parent_pid: int | None = None  # the process that started this one; when it is gone, the agent stops
    service_account: Path = SERVICE_ACCOUNT  # the folder with our own token


def read(words: dict[str, Any], environment: dict[str, str] | None = None) -> Settings:
    """The settings of the environment, overridden by those of the command line in `words`.

    Raises pydantic's ValidationError, which is a ValueError.
    """
    environment = dict(os.environ) if environment is None else environment
    values: dict[str, Any] = {"node": socket.gethostname().lower()}
    for name in Settings.model_fields:
        if (text := environment.get(PREFIX + name.upper())) is not None:
            values[name] = text
    values |= words
    if isinstance(values.get("disks"), str):
        values["disks"] = tuple(path for path in values["disks"].split(",") if path)
    for optional in ("folder", "xid_table"):
        values[optional] = values.get(optional) or None
    return Settings.model_validate(values)
