"""`muster shell` and `muster port-forward`: into a running worker, by the rights of one's own kubeconfig.

Neither goes through the API: Kubernetes decides by its own rules (pods/exec, pods/portforward) who may enter a pod.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import CliError, usage
from muster.cli.options import Job, Server, chosen_cluster, connect
from muster.cli.output import say

if TYPE_CHECKING:
    from muster.cli.cluster_connection import NamedCluster
    from muster.cli.options import JobsClient

Worker = Annotated[int, typer.Option("--worker", min=0, help="Number of the worker.")]
# Of the user's choice first; every image has the last.
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash || exec sh")
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class WorkerPod:
    """The pod of a worker, and the cluster that it is in."""

    cluster: NamedCluster
    pod: str


def shell(
    job: Job,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND…", help="A command in place of a shell.")
    ] = None,
    worker: Worker = 0,
    server: Server = None,
) -> None:
    """Open a shell in a running worker, or run a command there. Its exit code is the command's.

    In a cluster only, and by your own rights there: your kubeconfig must allow pods/exec in the job's namespace.
    """
    from muster.cli.cluster_connection import cluster_errors

    place = find_worker(job, worker, server, "shell")
    with contextlib.closing(place.cluster), cluster_errors(place.cluster, f"open a shell in {place.pod}"):
        code = _run_in(place, command or list(SHELL))
    raise typer.Exit(code)


def port_forward(
    job: Job,
    ports: Annotated[str, typer.Argument(metavar="[LOCAL:]PORT", help="Port of the worker, such as 8888.")],
    worker: Worker = 0,
    server: Server = None,
) -> None:
    """Make a port of a running worker, such as a notebook's, reachable on this machine until Ctrl-C.

    In a cluster only, and by your own rights there: your kubeconfig must allow pods/portforward in the job's namespace.
    """
    local, remote = read_ports(ports)
    place = find_worker(job, worker, server, "port-forward")
    with contextlib.closing(place.cluster):
        try:
            listening = socket.create_server(("127.0.0.1", local))
        except OSError as error:
            what = f"port {local} of this machine can't be had: {(error.strerror or str(error)).lower()}"
            raise usage(what, f"muster port-forward {job} {local + 1}:{remote}", "bad-port") from None
        with listening:
            here = listening.getsockname()[1]
            say(f"http://127.0.0.1:{here} is port {remote} of {place.pod}; Ctrl-C ends it", "bold green")
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=_forward, args=(place, connection, remote), daemon=True).start()


def read_ports(text: str) -> tuple[int, int]:
    """Parse `8888` or `9000:8888` into the port here and the worker's. Raises CliError."""
    local, colon, remote = text.rpartition(":")
    numbers = [local if colon else remote, remote]
    if not all(each.isascii() and each.isdigit() and 0 < int(each) < 65536 for each in numbers):
        raise usage(f"{text!r} is no port", "muster port-forward JOB 8888, or 9000:8888 for port 9000 here", "bad-port")
    return int(numbers[0]), int(numbers[1])


def find_worker(job: str, worker: int, server: str | None, command: str) -> WorkerPod:
    """The pod of the job's worker, as the cluster itself lists it. Raises CliError."""
    from muster.cli.cluster_client import ClusterClient
    from muster.cli.cluster_connection import connect_cluster
    from muster.cli.cluster_objects import ClusterObjects
    from muster.cli.cluster_views import id_of, status_of

    context, namespace = chosen_cluster()
    with connect(server) as client:
        document = client.get(f"jobs/{client.job_id(job)}")
        if not isinstance(client, ClusterClient):
            _refuse_this_machine(client, document, command)
            namespace = document["metadata"]["namespace"]
    name, job_id = document["metadata"]["name"], document["id"]
    cluster = connect_cluster(context, namespace)
    objects = ClusterObjects(cluster)
    item = objects.job(name)
    if id_of(item) != job_id:
        what = f"the job {name} in context {cluster.context!r} is another one than the server's"
        raise usage(what, "choose the server's cluster: muster --context NAME " + command, "other-cluster")
    attempt = status_of(item)["attempt"]
    pods = objects.pods(item, attempt)
    if worker not in pods:
        phase = status_of(item)["phase"]
        workers = f"; there are {', '.join(map(str, sorted(pods)))}" if pods else f": it is {phase}"
        raise CliError(f"{name} has no worker {worker} now{workers}", code="no-worker", next_step=f"muster why {name}")
    return WorkerPod(cluster, pods[worker])


def _refuse_this_machine(client: JobsClient, job: dict[str, Any], command: str) -> None:
    """Refuse the jobs of a `muster up`, whose workers are no pods."""
    from muster.client import running
    from muster.client.address import state_folder

    here = running.who(state_folder(None))
    if here is None or here.url != getattr(client.server, "url", ""):
        return
    if command == "shell":
        what = "the workers of this machine are processes in a sandbox, which nobody can enter from outside"
        next_step = f"work in the folder itself, or look by `muster logs {job['metadata']['name']}`"
    else:
        what = "the workers of this machine use its own network"
        next_step = "open the port at 127.0.0.1"
    raise usage(what, next_step, "no-pods")


# -- shell ----------------------------------------------------------------------------------------------------------


def _run_in(place: WorkerPod, command: list[str]) -> int:
    """Run a command in the pod with this process's input and output; returns its exit code."""
    from kubernetes.stream import stream

    from muster.cli.cluster_objects import CONTAINER

    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    opened = stream(
        place.cluster.core().connect_get_namespaced_pod_exec,
        place.pod,
        place.cluster.namespace,
        container=CONTAINER,
        command=command,
        stdin=True,
        stdout=True,
        stderr=not terminal,  # a terminal has one stream
        tty=terminal,
        binary=True,
        _preload_content=False,
    )
    with _raw_terminal(opened) if terminal else contextlib.nullcontext():
        threading.Thread(target=_send_input, args=(opened,), daemon=True).start()
        _write_output(opened)
    return int(opened.returncode or 0)


def _send_input(opened: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
        while block := os.read(sys.stdin.fileno(), BLOCK_BYTES):
            opened.write_stdin(block)
        opened.close_channel(0)  # the end of the input, where the server understands it


def _write_output(opened: Any) -> None:
    while opened.is_open():
        opened.update(timeout=1)
        _flush(opened)
    _flush(opened)


def _flush(opened: Any) -> None:
    for channel, target in ((1, sys.stdout.buffer), (2, sys.stderr.buffer)):
        if block := opened.read_channel(channel):
            target.write(block)
            target.flush()


@contextlib.contextmanager
def _raw_terminal(opened: Any) -> Iterator[None]:
    """Pass each key on as it is, and the window's size, now and whenever it changes."""
    import termios
    import tty

    def resize(*_: object) -> None:
        size = shutil.get_terminal_size()
        opened.write_channel(4, json.dumps({"Width": size.columns, "Height": size.lines}))

    before, handler = termios.tcgetattr(sys.stdin), signal.signal(signal.SIGWINCH, resize)
    try:
        tty.setraw(sys.stdin)
        resize()
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, handler)


# -- port-forward ---------------------------------------------------------------------------------------------------


def _forward(place: WorkerPod, connection: socket.socket, port: int) -> None:
    """Carry one connection to the pod and back, until either side ends."""
    from kubernetes.client.exceptions import ApiException
    from kubernetes.stream import portforward

    from muster.cli.cluster_connection import message_of

    with connection:
        try:
            # A client of its own: the library replaces the client's way of asking while it opens a stream.
            core = _own_core(place.cluster)
            opened = portforward(
                core.connect_get_namespaced_pod_portforward, place.pod, place.cluster.namespace, ports=str(port)
            )
        except ApiException as error:
            say(f"port {port} of {place.pod} can't be reached: {message_of(error)}", "red")
            return
        except OSError as error:
            say(f"port {port} of {place.pod} can't be reached: {error}", "red")
            return
        far = opened.socket(port)
        back = threading.Thread(target=_copy, args=(far, connection), daemon=True)
        back.start()
        _copy(connection, far)
        back.join()
        far.close()
        if problem := opened.error(port):
            say(f"port {port} of {place.pod}: {problem.strip()}", "red")


def _own_core(cluster: NamedCluster) -> Any:
    from kubernetes import client

    return client.CoreV1Api(client.ApiClient(cluster.api.configuration))


def _copy(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(BLOCK_BYTES):
            target.sendall(block)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
