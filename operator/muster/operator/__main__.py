"""`muster-operator`: run the operator, replay a decision, or dump what it sees of a job.

This is where the operator, which carries jobs, meets the recipe, which knows whether a training can run: specs are
read as `muster.recipe.document.JobSpec`, and everything else in this package knows only `muster.words`.

Exit codes: 0 stopped on request, 2 bad usage or settings, 3 another operator has the state folder, 4 the folder can't
be used, 5 the metrics port is taken, 1 anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import SettingsError

from muster.operator.settings import DEFAULT_NODES, OperatorSettings
from muster.recipe.document import JobSpec

BAD_USAGE, FOLDER_TAKEN, FOLDER_UNUSABLE, PORT_TAKEN = 2, 3, 4, 5


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"replay": _replay, "dump": _dump}
    if words and words[0] in commands:
        return commands[words[0]](words[1:])
    if _world(words) == "kubernetes":
        from muster.operator.kubernetes.service import main as operate_cluster

        return operate_cluster(words, JobSpec)
    return _run(words)


def _world(words: Sequence[str]) -> str:
    """Parse which world is requested; each has its own options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--world", default=os.environ.get("MUSTER_OPERATOR_WORLD", "local"))
    return str(parser.parse_known_args(list(words))[0].world)


def _run(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="muster-operator",
        description="Starts gangs of workers and brings them back. Options are also read from MUSTER_OPERATOR_*.",
        epilog="also: muster-operator --world kubernetes --help; muster-operator replay FILE; "
        "muster-operator dump --state DIR JOB",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"muster-operator {version('muster-train')}")
    parser.add_argument(
        "--world", choices=["local", "kubernetes"], help="what to act on (local: this machine's processes)"
    )
    parser.add_argument("--state", type=Path, metavar="DIR", help="the state folder (default ~/.muster)")
    parser.add_argument("--nodes", type=int, help="virtual nodes (default 4)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each (default 0: a CPU worker each)")
    parser.add_argument("--host", help="where /metrics and /healthz listen (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="their port (default 0: any free one, told in DIR/operator.json)")
    parser.add_argument("--prometheus-url", metavar="URL", help="ask this Prometheus about jobs too (default: none)")
    parser.add_argument("--log-format", choices=["auto", "console", "json"])
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="end when that process does; the gangs go on")
    parser.add_argument("--stop-workers", action="store_true", help="when told to stop, stop the gangs too")
    given = vars(parser.parse_args(words))
    try:
        settings = OperatorSettings(**given)
    except (ValidationError, SettingsError) as error:
        print(f"muster-operator: {_describe(error)}", file=sys.stderr)
        return BAD_USAGE

    from muster.local.cluster import UnusableFile
    from muster.operator.local.claim import FolderTaken, FolderUnusable
    from muster.operator.local.service import PortTaken, operate
    from muster.operator.logs import set_up_logs

    set_up_logs(settings.log_format, settings.log_level)
    try:
        operate(settings, JobSpec)
    except UnusableFile as error:
        print(f"muster-operator: {error}", file=sys.stderr)
        return FOLDER_UNUSABLE
    except (FolderTaken, FolderUnusable, PortTaken) as error:
        print(f"muster-operator: {error}", file=sys.stderr)
        return {FolderTaken: FOLDER_TAKEN, FolderUnusable: FOLDER_UNUSABLE, PortTaken: PORT_TAKEN}[type(error)]
    return 0


def _replay(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="muster-operator replay", description="Print what would be decided for a dumped job, and why."
    )
    parser.add_argument("file", metavar="FILE", help="what `muster-operator dump` wrote")

    from muster.operator.replay import main_replay

    return main_replay(parser.parse_args(words).file)


def _dump(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="muster-operator dump", description="Print what the operator sees of a job, as JSON for `replay`."
    )
    parser.add_argument("--state", type=Path, metavar="DIR", default=Path("~/.muster"), help="default ~/.muster")
    parser.add_argument("job", metavar="JOB", help="its name, namespace/name or uid")
    given = parser.parse_args(words)

    from muster.operator.core.observed import to_json
    from muster.operator.local.claim import read_claim
    from muster.operator.local.nodes import VirtualNodes
    from muster.operator.local.world import LocalWorld
    from muster.words.state_folder import StateFolder

    folder = Path(os.path.realpath(given.state.expanduser()))
    if not StateFolder(folder).cluster.exists():
        print(f"muster-operator: no jobs in {folder}: {StateFolder(folder).cluster.name} is not there", file=sys.stderr)
        return FOLDER_UNUSABLE
    operator = read_claim(folder)
    nodes = VirtualNodes(operator.get("nodes") or DEFAULT_NODES, operator.get("gpusPerNode") or 0)
    world = LocalWorld(folder, nodes, (), JobSpec, reads_only=True)
    uids = [job.uid for job in world.summaries() if given.job in (job.uid, job.name, f"{job.namespace}/{job.name}")]
    seen = asyncio.run(world.observe(uids[0], fresh=True)) if len(uids) == 1 else None
    if seen is None:
        message = (
            f"several jobs are named {given.job}; give its namespace/name"
            if uids
            else f"no job {given.job} in {folder}"
        )
        print(f"muster-operator: {message}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(to_json(seen) + b"\n")
    return 0


def _describe(error: ValidationError | SettingsError) -> str:
    if isinstance(error, SettingsError):
        return str(error)
    faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False))
    return "; ".join(faults)


if __name__ == "__main__":
    sys.exit(main())
