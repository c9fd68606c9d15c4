"""Ways to name a model in a document: the address of its folder, or a checkpoint of another job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from muster.words.address import AddressError, StorageAddress, parse_address
from muster.words.fields import FolderAddress, Positive, Text, address_of
from muster.words.rules import DocumentRule, RuledSpec


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


class FromCommit(RuledSpec):
    """Start from the weights of a checkpoint: of a job in the same project, or of a folder (`<uri>/<job uid>`)."""

    rules = (
        DocumentRule[Any](
            "name the source: job or uri",
            lambda it: (
                it.job is None
                and it.uri is None
                and "name the source: job (a job of this project) or uri (a job's checkpoint folder)"
            ),
            "has(self.job) || has(self.uri)",
        ),
    )

    job: Text | None = None
    """The job's id, or its name, which means the newest job of that name."""
    uri: FolderAddress | None = None
    """The checkpoint folder of a job: `<checkpoint.uri>/<job uid>`."""
    step: Annotated[Literal["best", "last"] | Positive, BeforeValidator(commit_step)] = "best"
    """The step of the checkpoint; `best` has the best evaluation.metric, `last` is the newest."""
