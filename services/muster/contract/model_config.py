"""Source of the model: a preset, a shape, a checkpoint or a model's folder."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from muster.contract.address import AddressError, StorageAddress, parse_address
from muster.contract.architecture import PRESETS, Architecture
from muster.contract.base import Spec
from muster.contract.fields import FolderAddress, Positive, Text, address_of


def _model_address(text: str) -> StorageAddress:
    address = parse_address(text)
    if address.scheme == "builtin" or not address.is_absolute:
        raise AddressError(
            f"{text!r} is no address of a model's folder: write s3://bucket/folder, file:///folder, "
            "https://host/folder or hf://organisation/name@revision"
        )
    return address


ModelAddress = Annotated[Text, address_of(_model_address)]


def commit_step(value: Any) -> Any:
    """Return the value if it names a commit's step: `best`, `last` or a number. Raises ValueError."""
    is_step = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 10**15
    if not is_step and value not in ("best", "last"):
        raise ValueError(f"must be best, last or the number of a step, not {value!r}"[:200])
    return value


class FromCommit(Spec):
    """Start from the weights of a checkpoint: of a job in the same project, or of a folder (`<uri>/<job uid>`)."""

    job: Text | None = None
    """The job's id, or its name, which means the newest job of that name."""
    uri: FolderAddress | None = None
    """The checkpoint folder of a job: `<checkpoint.uri>/<job uid>`."""
    step: Annotated[Literal["best", "last"] | Positive, BeforeValidator(commit_step)] = "best"
    """The step of the checkpoint; `best` has the best evaluation.metric, `last` is the newest."""

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.job is None and self.uri is None:
            raise ValueError("name the source: job (a job of this project) or uri (a job's checkpoint folder)")
        return self


class ModelConfig(Spec):
    """Model to train: exactly one of a preset, a shape, a checkpoint to start from, or a model's folder."""

    preset: Text | None = None
    """The name of a decoder's shape that Muster knows, such as muster-60m."""
    architecture: Architecture | None = None
    """The shape of a decoder of your own."""
    from_: FromCommit | None = Field(default=None, alias="from")
    """The checkpoint whose weights the job starts from."""
    source: ModelAddress | None = None
    """The address of a folder as Hugging Face writes it (config.json, safetensors, tokenizer.json): s3://, file://,
    https:// or hf://organisation/name@revision. The job has its weights, tokenizer and chat marks.
    """

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        kinds = {"preset": self.preset, "architecture": self.architecture, "from": self.from_, "source": self.source}
        given = [name for name, value in kinds.items() if value]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(kinds)} (given: {', '.join(given) or 'none'})")
        if self.preset and self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; there are {', '.join(PRESETS)}")
        return self

    @property
    def shape(self) -> Architecture | None:
        """Our own decoder's shape; None when the model comes from a commit or a folder."""
        return PRESETS[self.preset] if self.preset else self.architecture
