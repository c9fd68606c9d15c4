"""Discovery of the server that a program or a command talks to, and of its token."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from muster.client import running
from muster.client.errors import InvalidRequest, Unavailable
from muster.client.signed_in import token_for
from muster.words.state_folder import StateFolder

ENV_SERVER = "MUSTER_SERVER"
ENV_TOKEN = "MUSTER_TOKEN"  # noqa: S105 - the name of a variable
ENV_STATE = "MUSTER_STATE"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Server:
    """Address and token of an API. `source` says where the address came from, for error messages."""

    url: str
    source: str
    token: str | None = None
    signed_in: bool = False  # by `muster login`: the token is short-lived and renewed

    @property
    def local(self) -> bool:
        """Return whether this machine's paths mean the same to the server."""
        host = self.url.partition("://")[2].partition("/")[0]
        return (host if host.endswith("]") else host.rpartition(":")[0] or host) in LOOPBACK

    def __repr__(self) -> str:  # the token stays out of tracebacks
        return f"Server({self.url!r}, {self.source!r})"


def state_folder(given: Path | None, environ: Mapping[str, str] = os.environ) -> StateFolder:
    """--state, else MUSTER_STATE, else ~/.muster."""
    chosen = given or Path(environ.get(ENV_STATE) or Path.home() / ".muster")
    return StateFolder(chosen.expanduser().absolute())


def find_server(given: str | None, environ: Mapping[str, str] = os.environ, signing_in: bool = False) -> Server:
    """The one that is `given`, else MUSTER_SERVER, else the `muster up` that runs on this machine.

    Raises Unavailable where there is none, and InvalidRequest for an address or a token that can't be used.
    The token of that `muster up` is sent to no other server, and no token by whoever is `signing_in` anew.
    """
    state = state_folder(None, environ)
    here = running.who(state)
    for named, source in ((given, "--server"), (environ.get(ENV_SERVER), ENV_SERVER)):
        if named:
            url = _checked(named)
            return _opened(url, source, state if here and here.url == url else None, environ, signing_in)
    if here is None or not here.url:
        raise Unavailable(
            "no Muster server is named, and none runs on this machine",
            "no-server",
            next_step="start one with `muster up`, or name one by MUSTER_SERVER",
        )
    return _opened(here.url, f"`muster up` on {state.root}", state, environ, signing_in)


def server_for(given: str | None, token: str | None) -> Server:
    """Return the server of `find_server`, with this token if one is given."""
    server = find_server(given)
    return replace(server, token=token, signed_in=False) if token else server


def _opened(url: str, source: str, own: StateFolder | None, environ: Mapping[str, str], signing_in: bool) -> Server:
    """Return the server with its token: MUSTER_TOKEN, else the sign-in to this server, else the token's file, else that
    of one's own platform."""
    if signing_in:
        return Server(url, source)
    if not environ.get(ENV_TOKEN) and (token := token_for(url, environ)):
        return Server(url, source, token, signed_in=True)
    return Server(url, source, find_token(environ) or (own_token(own) if own else None))


def own_token(state: StateFolder) -> str | None:
    """The token that the `muster up` of this folder keeps for its user; None before its first start."""
    return _read_token(state.admin_token)


def find_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """MUSTER_TOKEN, else the file `muster/token` in the user's configuration folder, which only the user may read."""
    if environ.get(ENV_TOKEN):
        return environ[ENV_TOKEN].strip()
    folder = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return _read_token(folder / "muster" / "token")


def _read_token(path: Path) -> str | None:
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            what = f"{path} holds a token and others may read it"
            raise InvalidRequest(what, "token-file-open", next_step=f"chmod 600 {path}")
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(f"can't read the token in {path}: {error.strerror}", "token-file") from None


def _checked(url: str) -> str:
    url = url.strip().rstrip("/")
    if "://" not in url and re.fullmatch(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", url):
        url = f"http://{url}"  # of this machine, where nothing else is meant
    if not url.startswith(("http://", "https://")) or "@" in url:
        raise InvalidRequest(f"a server address looks like http://127.0.0.1:8642, not {url!r}", "bad-server")
    return url.removesuffix("/api/v1")
