"""What kube-proxy and a cluster's DNS would do for one node: addresses of Services, and names.

Each Service's address is added to the loopback device, and connections to it are passed on to a ready pod (or to a
server of the tests). A small name server knows Services, and the pods of headless ones by their host name.
"""

import asyncio
import contextlib
import itertools
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from tests.cluster.controlplane import ControlPlane

from muster.kube.client import ApiClient, Object
from muster.kube.connection import from_kubeconfig

# Of no Service, for their range ends before it.
DNS = "10.97.1.1"
HOST = "10.97.1.2"  # servers of the tests, as pods reach them
LOOK_SECONDS = 0.3
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Door = Callable[[], Awaitable[Stream]]


class Network:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._doors: dict[tuple[str, int], Door | None] = {}
        self._addresses: set[str] = set()
        self._names: dict[str, list[str]] = {}
        self._turn = itertools.count()

    def start(self) -> None:
        self._thread.start()
        self._do(self._begin())

    def stop(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        for address in self._addresses:
            subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "lo"], check=False, capture_output=True)

    def expose(self, port: int, target: int | str) -> None:
        """HOST:port leads to a port of this machine's loopback, or to a Unix socket."""

        async def door() -> Stream:
            if isinstance(target, str):
                return await asyncio.open_unix_connection(target)
            return await asyncio.open_connection("127.0.0.1", target)

        self._do(self._listen(HOST, port, door))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _begin(self) -> None:
        self._add_address(DNS)
        names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        names.bind((DNS, 53))
        await self._loop.create_datagram_endpoint(lambda: _NameServer(self._names), sock=names)
        self._watching = self._loop.create_task(self._watch())  # held, for tasks are only weakly known

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _watch(self) -> None:
        async with ApiClient(from_kubeconfig(self._plane.kubeconfig), agent="tests-network") as client:
            while True:
                with contextlib.suppress(OSError):
                    services = (await client.get("/api/v1/services"))["items"]
                    pods = (await client.get("/api/v1/pods"))["items"]
                    await self._arrange(services, pods)
                await asyncio.sleep(LOOK_SECONDS)  # not a wait: kube-proxy looks again

    async def _arrange(self, services: list[Object], pods: list[Object]) -> None:
        names: dict[str, list[str]] = {}
        for service in services:
            meta, spec = service["metadata"], service["spec"]
            name = f"{meta['name']}.{meta['namespace']}.svc"
            behind = [pod for pod in pods if _is_behind(service, pod)]
            if spec.get("clusterIP") == "None":
                names[name] = [pod["status"]["podIP"] for pod in behind]
                names |= {f"{pod['spec'].get('hostname')}.{name}": [pod["status"]["podIP"]] for pod in behind}
                continue
            names[name] = [spec["clusterIP"]]
            for port in spec["ports"]:
                targets = [("127.0.0.1", int(self._plane.server.rpartition(":")[2]))]
                if (meta["namespace"], meta["name"]) != ("default", "kubernetes"):
                    targets = [(pod["status"]["podIP"], _port_of(pod, port)) for pod in behind]
                await self._listen(spec["clusterIP"], port["port"], self._to_one_of(targets))
        self._names.clear()
        self._names.update(names)

    def _to_one_of(self, targets: list[tuple[str, int]]) -> Door | None:
        async def door() -> Stream:
            return await asyncio.open_connection(*targets[next(self._turn) % len(targets)])

        return door if targets else None

    async def _listen(self, address: str, port: int, door: Door | None) -> None:
        place = (address, port)
        known = place in self._doors
        self._doors[place] = door
        if known:
            return

        async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                to = self._doors[place]
                if to is not None:
                    with contextlib.suppress(OSError):
                        inner, outer = await asyncio.wait_for(to(), 5)
                        with contextlib.closing(outer):
                            await asyncio.gather(_pump(reader, outer), _pump(inner, writer))

        self._add_address(address)
        await asyncio.start_server(passed_on, address, port)

    def _add_address(self, address: str) -> None:
        if address not in self._addresses:
            self._addresses.add(address)
            subprocess.run(["ip", "address", "replace", f"{address}/32", "dev", "lo"], check=True, capture_output=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


def _is_behind(service: Object, pod: Object) -> bool:
    selector = service["spec"].get("selector") or {}
    labels = pod["metadata"].get("labels") or {}
    if not selector or pod["metadata"]["namespace"] != service["metadata"]["namespace"]:
        return False
    status = pod["status"]
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    return (
        selector.items() <= labels.items()
        and bool(status.get("podIP"))
        and status["phase"] in ("Pending", "Running")
        and (ready or bool(service["spec"].get("publishNotReadyAddresses")))
    )


def _port_of(pod: Object, port: Object) -> int:
    wanted = port.get("targetPort", port["port"])
    named = {p.get("name"): p["containerPort"] for c in pod["spec"]["containers"] for p in c.get("ports") or ()}
    return wanted if isinstance(wanted, int) else int(named[wanted])


class _NameServer(asyncio.DatagramProtocol):
    def __init__(self, names: dict[str, list[str]]) -> None:
        self._names = names

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._transport.sendto(answer(data, self._names), addr)


def answer(query: bytes, names: dict[str, list[str]]) -> bytes:
    """To a question about IPv4 addresses; a known name's other records are empty (RFC 1035 §4.1)."""
    words, place = [], 12
    while query[place]:
        words.append(query[place + 1 : place + 1 + query[place]].decode())
        place += 1 + query[place]
    kind = int.from_bytes(query[place + 1 : place + 3], "big")
    known = names.get(".".join(words).lower().removesuffix(".cluster.local"))
    found = (known or []) if kind == 1 else []
    flags = 0x8580 | (0 if known is not None else 3)  # an answer, authoritative; 3: no such name
    head = query[:2] + flags.to_bytes(2, "big") + b"\0\1" + len(found).to_bytes(2, "big") + bytes(4)
    records = [b"\xc0\x0c\0\1\0\1" + (1).to_bytes(4, "big") + b"\0\4" + socket.inet_aton(ip) for ip in found]
    return head + query[12 : place + 5] + b"".join(records)
