"""Decodes only those fields of an object that somebody reads. The others, nine tenths of a pod, are never made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import SchemaValidator, core_schema, from_json

# Field → the same of the mapping (or of the list of mappings) that it holds, or None: all of it.
Fields = dict[str, Any]
WHOLE = None


def decoder(fields: Fields) -> Callable[[bytes], Any]:
    """Return a decoder of a list's page and of a watch's event, with these fields of each object. Raises ValueError.

    What is of another shape is decoded as a whole: a watch may send a Status, whose `status` is a word.
    """
    shape = {"type": WHOLE, "object": fields, "metadata": WHOLE, "items": [fields]}
    chosen = SchemaValidator(_schema(shape)).validate_json

    def decode(text: bytes) -> Any:
        try:
            return chosen(text)
        except ValidationError:
            return from_json(text)

    return decode


def _schema(fields: Any) -> core_schema.CoreSchema:
    if fields is WHOLE:
        return core_schema.any_schema()
    if isinstance(fields, list):
        return core_schema.nullable_schema(core_schema.list_schema(_schema(fields[0])))
    typed = {name: core_schema.typed_dict_field(_schema(inner), required=False) for name, inner in fields.items()}
    return core_schema.nullable_schema(core_schema.typed_dict_schema(typed, extra_behavior="ignore"))
