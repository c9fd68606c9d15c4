"""Request body of a secret."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from muster.contract.address import refuse_metadata_url
from muster.contract.base import Spec

VALUE_LENGTH_MAX = 65_536  # Linux takes no variable longer than 128 KiB, and a cluster no Secret larger than 1 MiB
KEYS_MAX = 64


def _usable(value: str) -> str:
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError("must be text without NUL and halves of characters, which no variable can hold")
    refuse_metadata_url(value)
    return value


Key = Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
Value = Annotated[str, Field(min_length=1, max_length=VALUE_LENGTH_MAX), AfterValidator(_usable)]


class SecretRequest(Spec):
    """A secret as it is to be: all of its entries. They are shown to nobody."""

    data: Annotated[dict[Key, Value], Field(min_length=1, max_length=KEYS_MAX)]
    """The value of each entry by its key."""
