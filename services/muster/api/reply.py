"""The base of every answer's shape."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Reply(BaseModel):
    """camelCase keys."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)
