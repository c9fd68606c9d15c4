"""Experiment trackers that a job reports to, besides Muster's own records. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from muster.words.address import refuse_metadata_url
from muster.words.base import Spec
from muster.words.fields import Text

WANDB_KEY = "WANDB_API_KEY"  # the variable that its library reads its token from


def _service(text: str) -> str:
    refuse_metadata_url(text)
    return text


ServiceUrl = Annotated[
    str, Field(pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$", max_length=2_000), AfterValidator(_service)
]


class Wandb(Spec):
    """A run of Weights & Biases per job, which later attempts go on with."""

    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    """The project that the run belongs to."""
    entity: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] | None = None
    """The team or person whose project it is; left out, the token's own."""
    mode: Literal["online", "offline"] = "online"
    """`online` needs the variable WANDB_API_KEY. `offline` keeps each attempt's files alongside the checkpoints, for
    `wandb sync`.
    """
    url: ServiceUrl | None = None
    """The address of a server of one's own."""


class Mlflow(Spec):
    """A run of MLflow per job, which later attempts go on with."""

    url: ServiceUrl
    """The address of the tracking server. What it asks for stands in MLFLOW_TRACKING_TOKEN and its like."""
    experiment: Text
    """The experiment that the run belongs to, which is made where there is none."""


class Tracking(Spec):
    """Experiment trackers that receive every step and evaluation. None of them can hold up or end a run: one that hangs
    or fails is left out, and the condition TrackingFailed says so.
    """

    tensorboard: bool = False
    """Whether TensorBoard's event files are written alongside the checkpoints, in the folder `tensorboard`."""
    wandb: Wandb | None = None
    """Weights & Biases; left out, not."""
    mlflow: Mlflow | None = None
    """MLflow; left out, not."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The trackers that are asked for."""
        asked = {"tensorboard": self.tensorboard, "wandb": self.wandb is not None, "mlflow": self.mlflow is not None}
        return tuple(name for name, is_asked in asked.items() if is_asked)
