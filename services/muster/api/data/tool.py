"""A program of ours that reads what somebody else sent, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolEnd:
    """code: negative for the signal that ended it."""

    code: int
    said: bytes
    complained: bytes


async def run_module(
    module: str, *arguments: str, given: bytes | None = None, environment: Mapping[str, str] | None = None
) -> ToolEnd:
    """Run `python -m module` to its end, with `given` as its standard input. Who gives up waiting ends it, and all
    that it has started."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        said, complained = await process.communicate(given)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode is not None
    return ToolEnd(process.returncode, said, complained)
