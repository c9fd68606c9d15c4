"""Names of fine-tuned models: ft:<base>:<project>:<suffix>:<job>, and with :ckpt-step-<n> one of its checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FINE_TUNED = re.compile(r"ft:[^:]+:[^:]*:[^:]*:([0-9a-f-]{1,64})(?::ckpt-step-([0-9]{1,15}))?")


# Any job of this server, also one that no client of OpenAI's made.
_JOB = re.compile(r"job:([a-z0-9-]{1,64})(?::ckpt-step-([0-9]{1,15}))?")


@dataclass(frozen=True)
class NamedJob:
    """A job by its name or id, and the step of its checkpoint: None for the best one."""

    job: str
    step: int | None


@dataclass(frozen=True)
class FineTuned:
    """The job that made the model, and the step of its commit: None for the best one."""

    job_id: str
    step: int | None


def fine_tuned_model(base: str, project: str, suffix: str | None, job_id: str, step: int | None = None) -> str:
    return f"ft:{base}:{project}:{suffix or ''}:{job_id}" + (f":ckpt-step-{step}" if step is not None else "")


def fine_tuned_of(model: str) -> FineTuned | None:
    """Parse the name of a fine-tuned model, or return None for a name that no fine-tuned model has."""
    match = _FINE_TUNED.fullmatch(model)
    return FineTuned(match[1], int(match[2]) if match[2] else None) if match else None


def job_of(model: str) -> NamedJob | None:
    """Parse `job:<name or id>`, or return None for any other name."""
    match = _JOB.fullmatch(model)
    return NamedJob(match[1], int(match[2]) if match[2] else None) if match else None
