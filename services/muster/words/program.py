"""A program of the user's own, which a job runs in place of Muster's trainer."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from muster.words.base import Many, Spec
from muster.words.fields import DataAddress, FolderAddress, Positive, Text
from muster.words.model_sources import FromCommit, ModelAddress, commit_step
from muster.words.rules import DocumentRule, RuledSpec

NO_DATA_TO_INSPECT = "a program reads its data itself, so that there is none here to inspect"
ARCHIVES = (".tar.gz", ".tgz")  # names of a source's archive
WORDS_MAX = 256  # as the CRD bounds every list
INPUTS_MAX = 64
EVALUATED = "checkpoint"  # the input of an evaluation's jobs
EVALUATIONS_ARE_THE_APIS = (
    "after is for Muster's API, which makes a job for each checkpoint: submit it there, by `muster submit` without "
    "--context"
)
# An input's name is a folder's name on the worker: no separator, no leading dot, no `..`.
INPUT_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


def _argument(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character, which no command can have")
    return text


def _input_name(text: str) -> str:
    if not re.fullmatch(INPUT_NAME, text):
        raise ValueError(
            f"{text[:80]!r} is no name of a folder: letters, digits, `.`, `_` and `-`, at most 63 characters"
        )
    return text


def _below_working_directory(text: str) -> str:
    parts = text.split("/")
    if text.startswith(("/", "~")) or ".." in parts or "\0" in text or "://" in text:
        raise ValueError("must be a folder below the working directory, such as out/checkpoints, without `..`")
    return text


Argument = Annotated[str, Field(max_length=2_000), AfterValidator(_argument)]
InputName = Annotated[str, AfterValidator(_input_name)]
RelativeFolder = Annotated[Text, AfterValidator(_below_working_directory)]


class Input(RuledSpec):
    """A folder that the program finds in $MUSTER_INPUTS_DIR: a checkpoint of another job, or a model's folder."""

    rules = (
        DocumentRule[Any](
            "name what it is by exactly one of job (or uri, a job's checkpoint folder) and source",
            lambda it: (it.source is None) == (it.job is None and it.uri is None),
            "has(self.source) != (has(self.job) || has(self.uri))",
        ),
    )

    job: Text | None = None
    """The id of a job of this project, or its name, which means the newest job of that name."""
    uri: FolderAddress | None = None
    """The checkpoint folder of a job: `<checkpoint.uri>/<job uid>`."""
    step: Annotated[Literal["best", "last"] | Positive, BeforeValidator(commit_step)] = "best"
    """The step of the checkpoint; `best` has the best metric, `last` is the newest."""
    source: ModelAddress | None = None
    """The address of a model's folder, as in training.model.source."""

    @property
    def commit(self) -> FromCommit | None:
        """Return the checkpoint that it is, or None for a model's folder."""
        if self.source is not None:
            return None
        return FromCommit.model_validate({"job": self.job, "uri": self.uri, "step": self.step})


class Hang(Spec):
    """Detection of a program that no longer moves."""

    silent_seconds: Positive | None = None
    """Seconds without output after which the program counts as hung; for programs whose steps can't be counted."""
    step_seconds: Positive | None = None
    """Seconds without a finished step after which the program counts as hung; left out, it follows from the program's
    own pace."""
    off: bool = False
    """Whether the program is never taken for hung."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if self.off and (self.silent_seconds is not None or self.step_seconds is not None):
            raise ValueError("off contradicts silentSeconds and stepSeconds; leave one out")
        return self


def _which_checkpoints(value: Any) -> Any:
    try:
        return value if value == "kept" else commit_step(value)
    except ValueError:
        raise ValueError(f"must be kept, best, last or the number of a step, not {value!r}"[:200]) from None


class After(Spec):
    """Checkpoints of another job, for each of which the program is run once, as a job of its own."""

    job: Text
    """The id of a job of this project, or its name, which means the newest job of that name."""
    each: Annotated[Literal["kept", "best", "last"] | Positive, BeforeValidator(_which_checkpoints)] = "kept"
    """`kept`: each checkpoint of the job as it appears; `best` and `last`: that one checkpoint, once the job has
    ended; a number: the checkpoint of that step."""
    uri: FolderAddress | None = None
    """The checkpoint folder of the job: `<checkpoint.uri>/<job uid>`. Muster's API fills it in."""


class Program(Spec):
    """A program of the user's own, such as a training script, with its command, its source and its inputs."""

    command: Annotated[Many[Argument], Field(min_length=1, max_length=WORDS_MAX)]
    """The command and its arguments. What begins with a `.py` file or `-m` is run by the image's Python; anything else
    is run as it is."""
    launcher: Literal["torchrun", "none"] = "torchrun"
    """`torchrun` starts the command once for each rank, with torchrun's variables; `none` starts it once for each
    worker."""
    source: DataAddress | None = None
    """The program's source: a folder where the job is submitted, which is uploaded; later the address of the archive
    (.tar.gz) that it became."""
    inputs: Annotated[dict[InputName, Input], Field(max_length=INPUTS_MAX)] = {}
    """Folders that lie on the worker before the program starts, by their names in $MUSTER_INPUTS_DIR."""
    after: After | None = None
    """Checkpoints that the program evaluates: for each of them a job is made, which finds it in
    $MUSTER_INPUTS_DIR/checkpoint."""
    hang: Hang = Hang()
    steps: Positive | None = None
    """The steps that the program will take, for percentages and the time that is left."""

    @model_validator(mode="after")
    def _names_a_command(self) -> Self:
        if not self.command[0].strip():
            raise ValueError("command[0]: is empty; name a program, such as train.py")
        if self.after is not None and EVALUATED in self.inputs:
            raise ValueError(f"inputs.{EVALUATED}: is the checkpoint that `after` evaluates; take another name")
        return self
