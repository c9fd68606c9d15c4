"""`muster init` and `muster finetune`: the job of a model and data, written after a look at both."""

from __future__ import annotations

import os
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import CliError, ExitStatus, usage
from muster.cli.options import Json, Project, Server, Settings, connect
from muster.cli.output import print_json, say
from muster.client.errors import MusterError, Unavailable

if TYPE_CHECKING:
    from muster.cli.job_file import JobFile
    from muster.cli.options import JobsClient
    from muster.plan.proposal import JobWishes, ProposedJob

_SUFFIX_BYTES = 2
_NAME_LENGTH = 40
_MODEL_HELP = "A model's folder, hf://organisation/name, s3://bucket/folder, a preset, or one of your jobs."
_DATA_HELP = "Data: a file, folder, glob or address. JSON lines, CSV or Parquet; chats, pairs or texts."

Epochs = Annotated[int | None, typer.Option("--epochs", min=1, help="Passes through the data. Default: 3 for chats.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate. Default: the usual one.")]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=0, help="GPUs of each worker; 0: CPU. Default: those that there are.")
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Number of workers.")]
HeldOut = Annotated[
    str | None,
    typer.Option("--evaluation", metavar="FILE", help="Held-out data. Default: a share of the training data."),
]
Task = Annotated[str | None, typer.Option("--task", help="sft, pretrain, dpo, kto, … Default: by the data's format.")]
MethodOption = Annotated[
    str | None, typer.Option("--method", help="whole, lora or qlora. Default: by the model's size.")
]
Length = Annotated[
    int | None, typer.Option("--sequence-length", min=1, help="Tokens of a row. Default: by the data's lengths.")
]


@dataclass(frozen=True)
class _Options:
    """Options of both commands that decide what the job is."""

    name: str | None
    epochs: int | None
    lr: float | None
    gpus: int | None
    nodes: int
    evaluation: str | None
    task: str | None
    method: str | None
    sequence_length: int | None
    project: str | None = None

    def wishes(self, model: str, data: str, name: str, folder: Path) -> JobWishes:
        from muster.plan.proposal import METHODS, TASKS, JobWishes

        for option, value, allowed in (("--task", self.task, TASKS), ("--method", self.method, METHODS)):
            if value is not None and value not in allowed:
                raise usage(f"{option} is one of {', '.join(allowed)}, not {value!r}", f"{option} {allowed[0]}")
        return JobWishes(
            name=name,
            model=model_setting(model, folder),
            data=data,
            task=self.task or "",
            method=self.method or "",
            evaluation=self.evaluation or "",
            sequence_length=self.sequence_length,
            epochs=self.epochs,
            lr=self.lr,
            nodes=self.nodes,
            gpus=self.gpus,
            project=self.project or "",
        )


def init(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)] = None,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help=_DATA_HELP)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("job.yaml"),
    name: Annotated[str | None, typer.Option("--name", help="Name of the job. Default: the data file's.")] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    gpus: Gpus = None,
    nodes: Nodes = 1,
    evaluation: HeldOut = None,
    task: Task = None,
    method: MethodOption = None,
    sequence_length: Length = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask; needs MODEL and DATA.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Write a job file for a model and data: looks at both, chooses the settings, and explains each in a comment.

    Asks for what is not given. Then it shows the plan, and the command that submits the job.
    """
    if output.exists():
        raise usage(
            f"{output} is there already", f"name another file by --output, or submit it: muster submit {output}"
        )
    asks = not (yes or json)
    model = model or _asked(asks, "MODEL", "Model", _MODEL_HELP)
    data = data or _asked(asks, "DATA", "Data", _DATA_HELP)
    options = _Options(name, epochs, lr, gpus, nodes, evaluation, task, method, sequence_length)
    folder = output.absolute().parent
    with _Platform(server) as platform:
        wishes = options.wishes(model, data, name or job_name(data), Path.cwd())
        proposed = platform.propose(wishes)
        text = written(proposed, None if folder == Path.cwd() else Path.cwd())
        with output.open("x") as opened:
            opened.write(text)
        if json:
            print_json({"file": str(output), "document": proposed.document})
            return
        say(f"Wrote {output}", "bold green")
        platform.show_plan(output)
    say(f"  muster submit {output} --follow    train it")
    say(f"  muster data inspect {output}       the data as the model will see it")


def finetune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    data: Annotated[str, typer.Argument(metavar="DATA", help=_DATA_HELP)],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the job. Default: the data file's, with a few letters.")
    ] = None,
    epochs: Epochs = None,
    lr: Rate = None,
    gpus: Gpus = None,
    nodes: Nodes = 1,
    evaluation: HeldOut = None,
    task: Task = None,
    method: MethodOption = None,
    sequence_length: Length = None,
    project: Project = None,
    settings: Settings = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the job to this file.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the job to its end; its result is the exit code.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan without submitting.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Fine-tune a model on data: choose the settings as `muster init` does, show the plan, and submit the job.

    `muster get JOB --spec` prints the job afterwards.
    """
    from muster.cli import submit as story
    from muster.cli.follow import follow as watch
    from muster.cli.job_file import set_value
    from muster.cli.paths import make_absolute
    from muster.client.documents import project_of

    if output is not None and output.exists():
        raise usage(f"{output} is there already", "name another file by --output, or remove it")
    options = _Options(name, epochs, lr, gpus, nodes, evaluation, task, method, sequence_length, project)
    with connect(server) as client:
        own_name = name or f"{job_name(data)[:_NAME_LENGTH]}-{secrets.token_hex(_SUFFIX_BYTES)}"
        proposed = _Platform(server, client).propose(options.wishes(model, data, own_name, Path.cwd()))
        file = _as_file(proposed)
        for assignment in settings or []:
            set_value(file, assignment)
        if output is not None:
            with output.open("x") as opened:
                opened.write(written(proposed, None if output.absolute().parent == Path.cwd() else Path.cwd()))
        upload = None if dry_run else story.uploader(client, asks=not (yes or json))
        make_absolute(file, client.server.local, upload(project_of(file.data)) if upload is not None else None)
        plan = story.request_plan(client, file)
        if dry_run and json:
            print_json(plan)
        elif not json:
            story.show_plan(plan)
        if dry_run:
            raise typer.Exit(ExitStatus.FAILED if story.does_not_fit(plan) else ExitStatus.OK)
        if not (yes or story.agreed(plan, json)):
            say("Nothing was submitted.")
            raise typer.Exit(ExitStatus.FAILED)
        job = story.send(client, file)
        if not follow:
            story.announce(job)
            return
        say(f"Submitted {job['metadata']['name']} ({job['id']})", "bold green")
        raise typer.Exit(watch(client, job))


class _Platform:
    """Place to train on: a server's nodes, or this machine where no server is there."""

    def __init__(self, server: str | None, client: JobsClient | None = None) -> None:
        self._client, self._owned = client, False
        if client is not None:
            return
        try:
            self._client, self._owned = connect(server), True
        except MusterError as error:
            if server is not None or not isinstance(error, Unavailable):
                raise

    def __enter__(self) -> _Platform:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._client is not None and self._owned:
            self._client.__exit__(*exception)

    def propose(self, wishes: JobWishes) -> ProposedJob:
        """Look at the model and the data, and return the job. Raises CliError for what no job could use."""
        from dataclasses import replace

        from muster.plan.proposal import preliminary, propose
        from muster.recipe.document import parse_job
        from muster.storage.proposing import look_for_proposal
        from muster.words.base import InvalidDocument

        file = _file_of(preliminary(wishes))
        self._name_checkpoints(file.data["spec"]["training"]["model"])
        from muster.cli.paths import make_absolute

        make_absolute(file, local=True)
        try:
            training = parse_job(file.data).spec.training_config
        except InvalidDocument as invalid:
            raise usage(f"{invalid.problems[0]}", "muster init --help") from None
        look = look_for_proposal(training)
        for what, fault in (("the model", look.model_fault), ("the data", look.data_fault)):
            if fault:
                raise CliError(f"{what} can't be used: {fault}", ExitStatus.USAGE, "not-usable")
        for gap in look.gaps:
            say(f"not known: {gap}", "dim")
        gpus, gpu_bytes = self._gpus()
        return propose(wishes, replace(look.facts, gpus=gpus, gpu_bytes=gpu_bytes))

    def show_plan(self, path: Path) -> None:
        """Show the server's plan of a job file; without a server, an estimate."""
        from muster.cli import estimate
        from muster.cli import submit as story

        if self._client is None:
            try:
                estimate.show_briefly(estimate.work_out(story.prepare(str(path), None, [], local=True)))
            except CliError as error:
                if error.code != "model_unreadable":
                    raise
            say("not planned: no server runs here; start one with `muster up`", "dim")
        elif self._client.server.local:
            story.show_plan(story.request_plan(self._client, story.prepare(str(path), None, [], local=True)))
        else:
            say("not planned: the server is another machine, to which `muster submit` uploads the data", "dim")

    def _name_checkpoints(self, model: dict[str, Any]) -> None:
        """Write where the checkpoints of a job lie, which only a server knows."""
        origin = model.get("from")
        if origin is None or self._client is None:
            return
        job = self._client.get(f"jobs/{self._client.job_id(origin['job'])}")
        if folder := (job["status"].get("checkpoint") or {}).get("uri"):
            model["from"] = {"uri": folder, "step": origin["step"]}

    def _gpus(self) -> tuple[int, int | None]:
        """Return the GPUs of the largest node, and the memory of one where it is this machine's."""
        from muster.local.gpus import gpu_bytes, own_gpu_count

        if self._client is None:
            return own_gpu_count(os.environ), gpu_bytes()
        nodes = self._client.get("nodes")["items"]
        most = max((node["gpus"] for node in nodes), default=0)
        return most, gpu_bytes() if most and self._client.server.local else None


def model_setting(text: str, folder: Path) -> dict[str, Any]:
    """Return `training.model` for what somebody typed: a preset, a folder, a repository of the hub, or a job's name."""
    from muster.client.documents import RelativePath, missing_repository
    from muster.recipe.architecture import PRESETS
    from muster.words.names import JOB_NAME

    there = (folder / Path(text).expanduser()).exists()
    if there or "://" in text:
        return {"source": text}
    if text in PRESETS:
        return {"preset": text}
    if missing_repository(RelativePath({}, "source", "spec.training.model.source", text), folder) is not None:
        return {"source": f"hf://{text}"}
    return {"from": {"job": text, "step": "best"}} if JOB_NAME.fullmatch(text) else {"source": text}


def job_name(data: str) -> str:
    """Return a job's name for data: that of its file, in the letters that a name may have."""
    stem = Path(data.rstrip("/*").rpartition("/")[2]).name.partition(".")[0]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_NAME_LENGTH].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")


def written(proposed: ProposedJob, base: Path | None = None) -> str:
    """Return the document as YAML with its comments. Relative paths are made absolute by `base`, where the file lies in
    another folder than they were typed in."""
    from muster.client.documents import relative_paths
    from muster.documents.yaml_text import write_yaml

    if base is not None:
        for place in relative_paths(proposed.document):
            place.make_absolute(base)
    return write_yaml(proposed.document, proposed.comments)


def _as_file(proposed: ProposedJob) -> JobFile:
    """Return the proposal as if it had been read from a file of this folder, so that faults are shown at its lines."""
    return _file_of(proposed.document, proposed.comments)


def _file_of(data: dict[str, Any], comments: dict[str, str] | None = None) -> JobFile:
    from muster.cli.job_file import JobFile
    from muster.documents.yaml_text import read_yaml, write_yaml

    document = read_yaml(write_yaml(data, comments))
    return JobFile(document.data, "the job", document, Path.cwd())


def _asked(asks: bool, argument: str, what: str, hint: str) -> str:
    """Ask for a value on a terminal. Raises CliError where nobody can be asked."""
    from muster.cli.submit import on_terminal

    if not (asks and on_terminal()):
        raise usage(f"{argument} is missing, and nobody can be asked", "muster init MODEL DATA --yes")
    say(f"{what}: ", "bold", end="")
    say(f"({hint}) ", "dim", end="")
    if not (answer := sys.stdin.readline().strip()):
        raise usage(f"{argument} is missing", "muster init MODEL DATA")
    return answer
