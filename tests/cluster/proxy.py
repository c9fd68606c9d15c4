"""Stands between an operator and the API server, and does to their talk what networks and crashes do."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from tests.cluster.controlplane import ControlPlane
from yarl import URL

from muster.kube.tls import api_server_context


@dataclass(frozen=True)
class Call:
    method: str
    path: str

    @property
    def is_watch(self) -> bool:
        return "watch=1" in self.path


Trap = Callable[[Call], bool]


class Proxy:
    """before, after: told of each call when it came and when it was answered, but before the answer is handed on; what
    returns True swallows the call (before) or its answer (after). silent: watches stay open and say nothing more.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.before: Trap = lambda call: False
        self.after: Trap = lambda call: False
        self.silent = asyncio.Event()
        self._over = asyncio.Event()
        self.calls: list[Call] = []
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.server = ""

    async def start(self) -> None:
        application = web.Application(client_max_size=10**7)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._plane.folder / "apiserver.crt", self._plane.folder / "apiserver.key")
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self.server = f"https://127.0.0.1:{self._runner.addresses[0][1]}"
        upstream = api_server_context(self._plane.ca.read_text())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=upstream, limit=0), auto_decompress=False
        )

    async def stop(self) -> None:
        self._over.set()
        if self._runner is not None and self._session is not None:
            await self._runner.cleanup()
            await self._session.close()

    def heal(self) -> None:
        self.before = self.after = lambda call: False
        self.silent.clear()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        call = Call(request.method, str(request.rel_url))
        self.calls.append(call)
        if self.before(call):
            await self._over.wait()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        url = URL(self._plane.server + call.path, encoded=True)
        limits = aiohttp.ClientTimeout(total=None)
        async with self._session.request(
            request.method, url, data=await request.read() or None, headers=headers, timeout=limits
        ) as reply:
            if not call.is_watch:
                body = await reply.read()
                if self.after(call):
                    await self._over.wait()
                kept = {n: v for n, v in reply.headers.items() if n.lower() in ("content-type", "content-encoding")}
                return web.Response(status=reply.status, body=body, headers=kept)
            stream = web.StreamResponse(status=reply.status, headers={"Content-Type": "application/json"})
            await stream.prepare(request)
            async for chunk in reply.content.iter_any():
                if self.silent.is_set():
                    await self._over.wait()
                await stream.write(chunk)
            return stream
