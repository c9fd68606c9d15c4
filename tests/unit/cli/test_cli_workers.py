"""Shells and ports of workers, over a server that speaks Kubernetes' streams: exec and portforward by WebSocket."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import WSMsgType, web
from tests.polling import WAIT_SECONDS_MAX

from muster.cli import workers
from muster.cli.cluster_connection import NamedCluster, connect_cluster
from muster.cli.errors import CliError
from muster.cli.workers import WorkerPod, find_worker, read_ports
from muster.client import running
from muster.words.state_folder import StateFolder

UID = "0b8a7c52-8f6c-4d39-9b1e-6f3f6f1f4a11"
JOB = {
    "apiVersion": "muster.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "mine", "namespace": "team", "uid": UID, "creationTimestamp": "2026-11-28T00:00:00Z"},
    "spec": {"program": {"command": ["train.py"]}},
    "status": {"phase": "Running", "attempt": 2},
}
PODS = [{"metadata": {"name": f"mine-2-{number}", "labels": {"muster.dev/worker": str(number)}}} for number in (0, 1)]


async def job(_: web.Request) -> web.Response:
    return web.json_response(JOB)


async def pods(request: web.Request) -> web.Response:
    assert request.query["labelSelector"] == f"muster.dev/job-uid={UID},muster.dev/attempt=2"
    return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": PODS})


async def execute(request: web.Request) -> web.WebSocketResponse:
    """Answer a line with pod, container and command, the next with an exit code of 3."""
    stream = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
    await stream.prepare(request)
    command = " ".join(request.query.getall("command"))
    async for message in stream:
        if message.type is WSMsgType.BINARY and message.data[:1] == b"\0":
            words = f"{request.match_info['pod']} {request.query['container']} {command}: "
            await stream.send_bytes(b"\1" + words.encode() + message.data[1:])
            causes = [{"reason": "ExitCode", "message": "3"}]
            status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
            await stream.send_bytes(b"\3" + json.dumps(status).encode())
            await stream.close()
    return stream


async def forward(request: web.Request) -> web.WebSocketResponse:
    """Send back in capitals what arrives."""
    stream = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
    await stream.prepare(request)
    port = int(request.query["ports"]).to_bytes(2, "little")
    await stream.send_bytes(b"\0" + port)
    await stream.send_bytes(b"\1" + port)
    async for message in stream:
        if message.type is WSMsgType.BINARY and message.data[:1] == b"\0":
            await stream.send_bytes(b"\0" + message.data[1:].upper())
    return stream


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kubeconfig of the server, which runs in a thread."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    app = web.Application()
    app.router.add_get("/apis/muster.dev/v1alpha1/namespaces/team/trainingjobs/mine", job)
    app.router.add_get("/api/v1/namespaces/team/pods", pods)
    app.router.add_get("/api/v1/namespaces/team/pods/{pod}/exec", execute)
    app.router.add_get("/api/v1/namespaces/team/pods/{pod}/portforward", forward)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        async def start() -> web.AppRunner:
            runner = web.AppRunner(app)
            await runner.setup()
            await web.SockSite(runner, listening).start()
            return runner

        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(WAIT_SECONDS_MAX)
    path = tmp_path_factory.mktemp("kube") / "config"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "desk",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{listening.getsockname()[1]}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "desk", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
    }
    path.write_text(yaml.safe_dump(document))
    yield path
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def cluster(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> NamedCluster:
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.setattr(workers, "chosen_cluster", lambda: ("desk", None))
    monkeypatch.setattr("muster.cli.options._CHOSEN.context", "desk")
    return connect_cluster("desk")


def test_a_worker_is_found_by_its_number_in_the_newest_attempt(cluster: NamedCluster) -> None:
    assert find_worker("mine", 1, None, "shell").pod == "mine-2-1"
    with pytest.raises(CliError, match="mine has no worker 7 now; there are 0, 1"):
        find_worker("mine", 7, None, "shell")


def test_a_command_runs_in_the_worker_with_this_ones_input_and_its_exit_code(kubeconfig: Path) -> None:
    command = [sys.executable, "-m", "muster.cli", "--context", "desk", "shell", "mine", "--", "cat", "-n"]
    ended = subprocess.run(
        command, input=b"hello\n", capture_output=True, env={"KUBECONFIG": str(kubeconfig)}, check=False
    )
    assert ended.stdout == b"mine-2-0 trainer cat -n: hello\n"
    assert ended.returncode == 3, ended.stderr


def test_a_connection_goes_to_the_workers_port_and_back(cluster: NamedCluster) -> None:
    here, there = socket.socketpair()
    carried = threading.Thread(target=workers._forward, args=(WorkerPod(cluster, "mine-2-0"), there, 8888), daemon=True)
    carried.start()
    with here:
        here.sendall(b"get /")
        answer = here.recv(100)
    assert answer == b"GET /"


def test_a_worker_of_this_machine_can_not_be_entered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Client:
        class server:
            url = "http://127.0.0.1:1"

    monkeypatch.setenv("MUSTER_STATE", str(tmp_path))
    here = running.RunningPlatform(1, Client.server.url, 0.0)
    monkeypatch.setattr(running, "who", lambda state: here if state == StateFolder(tmp_path) else None)
    document = {"metadata": {"name": "mine"}}
    client: Any = Client()
    with pytest.raises(CliError, match="processes in a sandbox, which nobody can enter") as error:
        workers._refuse_this_machine(client, document, "shell")
    assert "muster logs mine" in error.value.next_step
    with pytest.raises(CliError, match="use its own network"):
        workers._refuse_this_machine(client, document, "port-forward")


@pytest.mark.parametrize(("text", "ports"), [("8888", (8888, 8888)), ("9000:80", (9000, 80))])
def test_ports_are_read(text: str, ports: tuple[int, int]) -> None:
    assert read_ports(text) == ports


@pytest.mark.parametrize("text", ["", "x", "0", "1:", ":1:2", "70000", "1:70000"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(CliError, match="is no port"):
        read_ports(text)
