"""The kinds of values that the documents' fields are made of, each with its bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field

from muster.words.address import StorageAddress, checkpoint_address, data_address

# Bounded, so that no sum of theirs leaves 64 bits: 10^15 tokens are some fifty times what anybody has trained on.
Positive = Annotated[int, Field(gt=0, le=10**15)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Seed = Annotated[int, Field(ge=0, le=2**53 - 1)]  # a bound of more bits is no number to a JSON schema
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, max_length=2_000)]
# An id, an ARN or an alias, as AWS KMS and servers like it name keys.
KmsKey = Annotated[str, Field(min_length=1, max_length=2_048, pattern=r"^[A-Za-z0-9][A-Za-z0-9:/_+=,.@-]*$")]


def address_of(parse: Callable[[str], StorageAddress]) -> AfterValidator:
    """Return a validator of text that `parse` accepts; the text is kept as it was written."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


FolderAddress = Annotated[Text, address_of(checkpoint_address)]
DataAddress = Annotated[Text, address_of(data_address)]
