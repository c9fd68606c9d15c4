"""The `muster` command. Nothing heavy is imported before a command needs it, so that `--help` comes at once."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from muster.cli import (
    audit,
    checkpoints,
    data,
    doctor,
    evaluating,
    explain,
    files,
    fleet,
    generation,
    importing,
    jobs,
    login,
    models,
    pages,
    people,
    platform,
    profile,
    programs,
    projects,
    proposing,
    report,
    secrets,
    serve,
    sweeps,
    tagging,
    tokens,
    usage,
    watch,
    webhooks,
    workers,
)
from muster.cli.errors import CliError, ExitStatus, cli_error
from muster.cli.options import choose_cluster
from muster.cli.output import outlive_readers, show_error
from muster.client.address import ENV_SERVER
from muster.client.errors import MusterError

EXIT_CODES = (
    "Exit codes: 0 done · 1 the job failed or the server said no · 2 bad input · 3 no server · 130 Ctrl-C · "
    "141 the reader left (`muster logs -f | head`)"
)

_CLUSTER_OPTIONS = ("--context", "--namespace")


class _MusterGroup(TyperGroup):
    """The `muster` command, whose --context and --namespace may also stand after a command that asks a server."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, options_first(self, args))


def options_first(group: Any, args: list[str]) -> list[str]:
    """Return the arguments with --context and --namespace before the command, where it has no such options of its own
    and asks a server. What stands behind `--` belongs to another program."""
    end = args.index("--") if "--" in args else len(args)
    command, at = group, 0
    while at < end and hasattr(command, "commands"):
        if args[at] in command.commands:
            command = command.commands[args[at]]
        elif args[at].startswith("-") and "=" not in args[at]:
            at += 1  # the value of an option
        at += 1
    own = {option for each in command.params for option in each.opts}
    if hasattr(command, "commands") or "--server" not in own:
        return args
    first, rest, words = list[str](), args[:at], iter(args[at:end])
    for word in words:
        name, equals, _ = word.partition("=")
        if name in _CLUSTER_OPTIONS and name not in own:
            if equals:
                first.append(word)
            elif (value := next(words, None)) is not None:
                first += [word, value]
            else:
                return args  # without its value: an error where it stands
        else:
            rest.append(word)
    return [*first, *rest, *args[end:]]


app = typer.Typer(
    name="muster",
    cls=_MusterGroup,
    help="Muster runs LLM training jobs and brings them back by itself after crashes, hangs, bad GPUs and preemptions.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "This machine": (platform.up, platform.down, platform.demo),
    "Platform": (
        pages.open,
        doctor.doctor,
        login.login,
        login.logout,
        people.whoami,
        fleet.queue,
        fleet.nodes,
        usage.usage,
        audit.audit,
    ),
    "Jobs": (
        proposing.init,
        proposing.finetune,
        jobs.submit,
        programs.run,
        importing.import_,
        jobs.estimate,
        explain.explain,
        jobs.ls,
        jobs.get,
        jobs.cancel,
        jobs.suspend,
        jobs.resume,
        jobs.clone,
        tagging.tag,
        jobs.rm,
    ),
    "Looking into a job": (
        watch.logs,
        watch.events,
        watch.metrics,
        watch.samples,
        watch.why,
        workers.shell,
        workers.port_forward,
        profile.profile,
        report.report,
        checkpoints.export,
        evaluating.evaluate,
        generation.generate,
        generation.chat,
        serve.serve,
    ),
}


def command_name(function: Callable[..., None]) -> str:
    """Return the name that the command is typed by."""
    return function.__name__.rstrip("_").replace("_", "-")


for panel, commands in PANELS.items():
    for command in commands:
        app.command(command_name(command), rich_help_panel=panel)(command)
app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel="Looking into a job")
app.add_typer(data.app, name="data", rich_help_panel="Looking into a job")
app.add_typer(files.app, name="files", rich_help_panel="Jobs")
app.add_typer(models.app, name="models", rich_help_panel="Jobs")
app.add_typer(sweeps.app, name="sweep", rich_help_panel="Jobs")
app.add_typer(projects.app, name="projects", rich_help_panel="Platform")
app.add_typer(secrets.app, name="secrets", rich_help_panel="Platform")
app.add_typer(webhooks.app, name="webhooks", rich_help_panel="Platform")
app.add_typer(people.app, name="people", rich_help_panel="Platform")
app.add_typer(tokens.app, name="tokens", rich_help_panel="Platform")


def _version(asked: bool) -> None:
    if asked:
        import importlib.metadata  # slow, and needed here only

        typer.echo(f"muster {importlib.metadata.version('muster-train')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    context: Annotated[
        str | None,
        typer.Option("--context", help="Speak to the cluster of this kubeconfig context itself, without Muster's API."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="With --context: another namespace than the context's.")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="Address of the API, as after the command (env: MUSTER_SERVER).")
    ] = None,
) -> None:
    """Muster runs LLM training jobs and brings them back by itself after crashes, hangs, bad GPUs and preemptions."""
    choose_cluster(context, namespace)
    if server is not None:
        os.environ[ENV_SERVER] = server


def main() -> None:
    """The console script."""
    outlive_readers()
    try:
        app(prog_name="muster")
    except MusterError as raised:
        error = cli_error(raised)
        show_error(error)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(int(ExitStatus.INTERRUPTED))
    except OSError as error:  # a full disk, a folder without rights, a damaged file: the world's fault, not ours
        show_error(CliError(_describe(error), code="machine"))
        sys.exit(int(ExitStatus.FAILED))


def _describe(error: OSError) -> str:
    if error.errno is None:
        return str(error)  # one of our own, in whole sentences
    reason = (error.strerror or type(error).__name__).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason += ": free some space and repeat the command"
    return f"{error.filename}: {reason}" if error.filename else reason
