"""`python -m muster.agent`: watch this node. `… announce`: say what has happened to a virtual one."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from muster.agent import settings as settings_of
from muster.agent.announced import announce
from muster.agent.board import NoticeBoard
from muster.agent.disks import DiskSource
from muster.agent.fabric import FabricSource
from muster.agent.gpus import GpuSource
from muster.agent.imds import ImdsSource
from muster.agent.kernel_log import KernelLog
from muster.agent.metrics import AgentMetrics
from muster.agent.server import serve
from muster.agent.source import NoticeSource, log
from muster.agent.watching import SourcePoller, boot_id, end_at_once, keep_file, keep_node
from muster.agent.xid import BadTable, XidSource, read_table
from muster.words.base import dump_json

OK, BAD_USAGE, PORT_TAKEN = 0, 2, 5
STOP_SECONDS = 5.0  # for the last word to the API server
PARENT_POLL_SECONDS = 0.5


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped on request, 2 bad usage or a bad table, 5 the port is taken."""
    arguments = _parser().parse_args(words)
    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "what")}
    try:
        if arguments.command == "announce":
            table = read_table(given.pop("xid_table", None))
            print(dump_json(announce(given["folder"], given["node"], arguments.what, table)))
            return OK
        settings = settings_of.read(given)
        table = read_table(settings.xid_table)
    except (ValidationError, BadTable, ValueError) as error:
        print(f"muster.agent: {error}", file=sys.stderr)
        return BAD_USAGE
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    return watch(settings, XidSource(table))


def watch(settings: settings_of.Settings, xids: XidSource) -> int:
    """Watch until SIGTERM or SIGINT."""
    gpus, fabric, disks = GpuSource(), FabricSource(settings.sysfs), DiskSource(settings.disks)
    sources: list[NoticeSource] = [KernelLog(settings.kernel_log, xids), gpus, fabric, disks]
    sources += [ImdsSource(settings.imds)] if settings.imds else []
    board = NoticeBoard(settings.node, boot_id())
    watching = SourcePoller(sources, board)
    metrics = AgentMetrics(board.now, watching.ages, gpus, xids, fabric, disks)
    try:
        server = serve(settings.host, settings.port, board.now, metrics.text, watching.stuck)
    except OSError as error:
        print(f"muster.agent: can't listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)
        return PORT_TAKEN
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: watching.stop.set())
    keepers = []
    if settings.folder is not None:
        keepers.append(threading.Thread(target=keep_file, args=(settings.folder, board, watching.stop), daemon=True))
    if settings.kubernetes:
        arguments = (settings.service_account, settings.node, board, watching.stop, watching.acknowledge)
        keepers.append(threading.Thread(target=keep_node, args=arguments, daemon=True))
    watching.start()
    for keeper in keepers:
        keeper.start()
    address = {"port": server.server_address[1], "node": settings.node, "pid": os.getpid()}
    log.info("watching: %s", json.dumps(address))
    while not watching.stop.wait(PARENT_POLL_SECONDS if settings.parent_pid else None):
        if os.getppid() != settings.parent_pid:
            watching.stop.set()
    for keeper in keepers:
        keeper.join(STOP_SECONDS)
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m muster.agent",
        description="Watches one node: GPUs, kernel log, network, disks, spot notices. Settings are also read from "
        "MUSTER_AGENT_* (MUSTER_AGENT_KERNEL_LOG for --kernel-log).",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--node", help="its name in the cluster (default: the host's name)")
    parser.add_argument("--host", help="where /notices, /metrics and /healthz listen (default: everywhere)")
    parser.add_argument("--port", type=int, help="default: 29502; 0: any free one")
    parser.add_argument("--folder", type=Path, help="also write the notices to <folder>/<node>.json")
    parser.add_argument("--kernel-log", type=Path, help="default: /dev/kmsg")
    parser.add_argument("--xid-table", type=Path, help="JSON whose entries replace those of the shipped table")
    parser.add_argument("--imds", help="address of the instance metadata service; '' asks none")
    parser.add_argument("--sysfs", type=Path, help="default: /sys")
    parser.add_argument("--disks", help="paths, one on each file system to watch, with commas (default: /tmp)")
    parser.add_argument("--parent-pid", type=int, help="stop when that process, which started this one, is gone")
    parser.add_argument("--kubernetes", action="store_true", help="write to the Node object, as the pod's own account")
    commands = parser.add_subparsers(dest="command", metavar="announce")
    parser.set_defaults(command="watch")
    said = commands.add_parser("announce", help="say what has happened to a virtual node of `muster up`")
    said.add_argument("node", help="e.g. local-1")
    said.add_argument("what", help="spot, rebalance, drain, xid:<code>, or clear")
    said.add_argument(
        "--folder", type=Path, default=Path("~/.muster/notices").expanduser(), help="default: ~/.muster/notices"
    )
    said.add_argument("--xid-table", type=Path, default=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    end_at_once(main())
