"""`python -m muster.api`: serve the REST API and the pages until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from muster.api.core.database.db import NO_CONNECTION
from muster.api.core.database.migrate import NewerDatabase
from muster.api.core.errors import ApiError
from muster.api.core.http.connections import timed_protocol
from muster.api.core.hub import NotificationHub
from muster.api.core.log import set_up_logs
from muster.api.core.settings import ApiSettings
from muster.local.cluster import UnusableFile
from muster.web.app import create_app
from muster.words.redaction import redact

EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
_PARENT_POLL_SECONDS = 0.5


class StartRefused(Exception):
    """The API does not start. The message is for a person, and `code` is what the process exits with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        settings = _settings(given)
        with contextlib.closing(_listen(settings.host, settings.port)) as listener:
            set_up_logs(settings.log_format)
            return uvloop.run(_serve(settings, listener, given.parent_pid))
    except StartRefused as refused:
        print(f"muster api: {refused}", file=sys.stderr)
        return refused.code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m muster.api",
        description="Serve Muster's REST API and its pages. Every option can also be set as MUSTER_API_<NAME>.",
    )
    parser.add_argument("--state", type=Path, help="the state folder (default: ~/.muster)")
    parser.add_argument("--host", help="where to listen (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port; 0: any free one (default: 8642)")
    parser.add_argument(
        "--no-auth", action="store_true", help="serve without tokens; only on this machine's own address"
    )
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    parser.add_argument("--log-format", choices=("json", "text"), help="how log lines look (default: json)")
    return parser


def _settings(given: argparse.Namespace) -> ApiSettings:
    options: dict[str, Any] = {
        name: value for name in ("state", "host", "port", "log_format") if (value := getattr(given, name)) is not None
    }
    if given.no_auth:
        options["auth"] = False
    try:
        return ApiSettings(**options)
    except ValidationError as error:
        faults = (f"{_place(entry['loc'])}{entry['msg'].removeprefix('Value error, ')}" for entry in error.errors())
        raise StartRefused(redact("; ".join(faults)), EXIT_USAGE) from None


def _place(loc: tuple[int | str, ...]) -> str:
    return f"{'.'.join(map(str, loc))}: " if loc else ""


def _listen(host: str, port: int) -> socket.socket:
    """Raises StartRefused: port in use, address of another machine, no permission."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cause = (
                f"port {port} of {host} is in use by another process; end that one, or choose another port with --port"
            )
        else:
            cause = (
                f"can't listen on {host} port {port}: {error.strerror or error}; choose others with --host and --port"
            )
        raise StartRefused(cause, EXIT_USAGE) from None


async def _serve(settings: ApiSettings, listener: socket.socket, parent_pid: int | None) -> int:
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        # A class, or what makes one.
        http=timed_protocol(settings.receive_seconds_max, settings.send_seconds_max),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="off",  # entered here, so that a failure to start is one clear line
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
        server_header=False,
    )
    server = ApiServer(config, app.state.hub)
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(app.router.lifespan_context(app))
        except (UnusableFile, NewerDatabase) as error:
            raise StartRefused(redact(str(error)), EXIT_UNAVAILABLE) from error
        except (SQLAlchemyError, OSError, ApiError, *NO_CONNECTION) as error:
            raise StartRefused(_why_not(settings, error), EXIT_UNAVAILABLE) from error
        except ValueError as error:
            raise StartRefused(redact(str(error)), EXIT_USAGE) from error
        if parent_pid is not None:
            await stack.enter_async_context(_with_parent(server, parent_pid))
        gc.freeze()  # what was imported never becomes garbage: to look through it takes a tenth of a second each time
        host, port = listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"muster api: http://{address}:{port}/api/v1", flush=True)
        await server.serve(sockets=[listener])
    return 0


def _why_not(settings: ApiSettings, error: Exception) -> str:
    lines = redact(str(error.__cause__ or error)).strip().splitlines()
    cause = lines[0] if lines else type(error).__name__
    if "not a database" in cause or "malformed" in cause:
        file = settings.layout.database
        return f"the database {file} is damaged ({cause}): restore a backup, or move it away to begin a new history"
    if "disk is full" in cause or "No space left" in cause:
        return f"the disk of the database is full ({cause}): free some space and start again"
    return f"the database can't be opened: {cause}; check the state folder (--state) or MUSTER_API_DATABASE_URL"


class ApiServer(uvicorn.Server):
    """Tells open streams to finish when the process is asked to end; else they would hold it for the whole grace."""

    def __init__(self, config: uvicorn.Config, hub: NotificationHub) -> None:
        super().__init__(config)
        self._hub = hub

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own: that one raises the signal again at the end, before the database is closed.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.end()

    def end(self) -> None:
        self._hub.close()
        self.should_exit = True


@contextlib.asynccontextmanager
async def _with_parent(server: ApiServer, pid: int) -> AsyncIterator[None]:
    """End the server when process `pid` is gone."""
    task = asyncio.create_task(_until_gone(pid))
    task.add_done_callback(lambda done: None if done.cancelled() else server.end())
    try:
        yield
    finally:
        task.cancel()


async def _until_gone(pid: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:
            pass  # a kernel without it
        else:
            await _readable(handle)
            return
    while _exists(pid):  # noqa: ASYNC110 - nothing wakes us where there is no pidfd
        await asyncio.sleep(_PARENT_POLL_SECONDS)


async def _readable(handle: int) -> None:
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    sys.exit(main())
