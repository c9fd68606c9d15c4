"""Request bodies that create files and uploads, as in OpenAI's API. Each field is checked, and the error names a wrong
one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema

from muster.api.openai.requests import OpenAIRequest
from muster.replies.files import Purpose

LIFETIME_SECONDS_MIN, LIFETIME_SECONDS_MAX = 3_600, 2_592_000  # an hour and thirty days, as OpenAI bounds them
PARTS_MAX: Final = 10_000

# Its words are checked by the service, which knows a near one.
PurposeName = Annotated[
    str, Field(min_length=1, max_length=100), WithJsonSchema({"type": "string", "enum": [str(p) for p in Purpose]})
]
PartId = Annotated[str, Field(min_length=1, max_length=80)]


class ExpiresAfter(OpenAIRequest):
    """The file is deleted so long after it is ready."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LIFETIME_SECONDS_MIN, le=LIFETIME_SECONDS_MAX)]


class CreateFile(OpenAIRequest):
    """Fields of a form alongside its file."""

    purpose: PurposeName
    expires_after: ExpiresAfter | None = None

    @property
    def lifetime_seconds(self) -> float | None:
        return float(self.expires_after.seconds) if self.expires_after else None


class CreateUpload(CreateFile):
    """A file that will come in parts."""

    bytes: Annotated[int, Field(ge=1, le=10**15)]
    filename: Annotated[str, Field(min_length=1, max_length=255)]
    mime_type: Annotated[str, Field(max_length=255, description="Not kept: the name's ending tells the format.")] = ""


class CompleteUpload(OpenAIRequest):
    """The parts in the order in which they make the file."""

    part_ids: Annotated[list[PartId], Field(min_length=1, max_length=PARTS_MAX)]
    md5: Annotated[str, Field(max_length=80, description="Of the whole file, in hex.")] | None = None


def nested(fields: Mapping[str, str]) -> dict[str, Any]:
    """A form's fields as one document: `expires_after[seconds]` is a key of a mapping there, and its number one.

    >>> nested({"purpose": "evals", "expires_after[seconds]": "3600"})
    {'purpose': 'evals', 'expires_after': {'seconds': 3600}}
    """
    document: dict[str, Any] = {}
    for name, value in fields.items():
        outer, bracket, inner = name.partition("[")
        if outer == "expires_after" and bracket and inner.endswith("]"):
            number = value.isascii() and value.isdigit() and len(value) < 12
            if not isinstance(document.get(outer), dict):  # it may be there as a plain field too
                document[outer] = {}
            document[outer][inner[:-1]] = int(value) if number else value
        else:
            document[name] = value
    return document


FORM_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": [str(p) for p in Purpose]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": LIFETIME_SECONDS_MIN,
            "maximum": LIFETIME_SECONDS_MAX,
        },
    },
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
}
PART_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["data"],
    "additionalProperties": False,
    "properties": {"data": {"type": "string", "format": "binary"}},
}
