"""Tags and a note: what people write at a job to find it again. They change nothing of how it runs."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from muster.words.base import Many, Spec

TAGS_MAX = 20
NOTE_CHARACTERS_MAX = 4_000
# No blank and no comma, which stand between tags.
Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/+-]*$", max_length=64)]
Tags = Annotated[Many[Tag], Field(max_length=TAGS_MAX)]


class JobAnnotations(Spec):
    """A change of a job's tags and note. Fields that are left out change nothing."""

    tags: Tags | None = None
    """All tags that the job is to have, in place of those that it has."""
    add_tags: Tags = ()
    """Tags that the job is to have as well."""
    remove_tags: Tags = ()
    """Tags that the job is to have no more."""
    note: Annotated[str, Field(max_length=NOTE_CHARACTERS_MAX)] | None = None
    """The job's note; an empty text removes it."""

    @model_validator(mode="after")
    def _says_it_once(self) -> Self:
        if self.tags is not None and (self.add_tags or self.remove_tags):
            raise ValueError("give tags, or else addTags and removeTags")
        return self
