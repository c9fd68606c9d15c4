"""`--hold`: a gang that does nothing until its time is over, for work in its workers by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.cli.errors import usage

if TYPE_CHECKING:
    from muster.cli.job_file import JobFile

# Pulling an image and starting count as well; a preempted gang begins its sleep anew, but the job ends at this time of
# activity in any case.
STARTING_SECONDS = 600


def hold_gang(file: JobFile, text: str) -> None:
    """Put a program that sleeps so long in the place of what the job would do. Its gang, image, source and inputs stay.

    Raises CliError for what is no time, or no document of a job.
    """
    from muster.words.job import duration_seconds

    try:
        seconds = duration_seconds(text)
    except ValueError as error:
        raise usage(f"--hold {error}", "--hold 2h") from None
    if seconds <= 0:
        raise usage("--hold must be longer than nothing", "--hold 2h")
    spec = file.data.get("spec")
    if not isinstance(spec, dict):
        return  # the server says what is wrong with it
    spec.pop("training", None)
    program = spec.get("program")
    kept = (
        {key: value for key, value in program.items() if key in ("source", "inputs")}
        if isinstance(program, dict)
        else {}
    )
    spec["program"] = {"command": ["sleep", str(seconds)], "launcher": "none", "hang": {"off": True}, **kept}
    spec.pop("tracking", None)  # of Muster's trainer
    if isinstance(checkpoint := spec.get("checkpoint"), dict):
        checkpoint.pop("every", None)
    deadline = spec.get("activeDeadlineSeconds")
    ends = seconds + STARTING_SECONDS
    spec["activeDeadlineSeconds"] = min(ends, deadline) if isinstance(deadline, int) else ends
