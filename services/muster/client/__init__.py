"""Muster from Python: `from muster.client import Muster` (or `AsyncMuster`), and jobs are submitted and followed.

What this package gives is loaded when it is first asked for: the command line stands on a part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.client.answers import LogLine, Metrics, Update
    from muster.client.async_files import AsyncFiles
    from muster.client.async_jobs import AsyncJob, AsyncJobs
    from muster.client.async_muster import AsyncMuster
    from muster.client.async_sweeps import AsyncSweep, AsyncSweeps
    from muster.client.errors import (
        Busy,
        Conflict,
        InvalidRequest,
        JobFailed,
        MusterError,
        NotAllowed,
        NotFound,
        Refused,
        Unavailable,
        Unreachable,
        WaitTimeout,
    )
    from muster.client.files import File, Files
    from muster.client.jobs import Job, Jobs
    from muster.client.muster import Muster
    from muster.client.sweeps import Sweep, Sweeps

__all__ = [
    "AsyncFiles",
    "AsyncJob",
    "AsyncJobs",
    "AsyncMuster",
    "AsyncSweep",
    "AsyncSweeps",
    "Busy",
    "Conflict",
    "File",
    "Files",
    "InvalidRequest",
    "Job",
    "JobFailed",
    "Jobs",
    "LogLine",
    "Metrics",
    "Muster",
    "MusterError",
    "NotAllowed",
    "NotFound",
    "Refused",
    "Sweep",
    "Sweeps",
    "Unavailable",
    "Unreachable",
    "Update",
    "WaitTimeout",
]

_HOME = {
    "answers": ("LogLine", "Metrics", "Update"),
    "async_files": ("AsyncFiles",),
    "async_jobs": ("AsyncJob", "AsyncJobs"),
    "async_muster": ("AsyncMuster",),
    "async_sweeps": ("AsyncSweep", "AsyncSweeps"),
    "files": ("File", "Files"),
    "jobs": ("Job", "Jobs"),
    "muster": ("Muster",),
    "sweeps": ("Sweep", "Sweeps"),
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOME.items() if name in names), "errors")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
