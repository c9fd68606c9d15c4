"""Patterns of parameters' names: which weights of a model a setting means. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator

from muster.words.base import Many
from muster.words.fields import Text


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a parameter of this name.

    A pattern is one part of a name or several that follow one another, in each of which `*`, `?` and `[…]` stand for
    what they do in file names. So `embed_tokens` means `model.embed_tokens.weight`, and `layers.[0-3]` all that the
    first four layers hold, but nothing of layer 10.
    """
    pattern_parts, parts = pattern.split("."), name.split(".")
    return any(
        all(fnmatchcase(part, each) for part, each in zip(parts[at:], pattern_parts, strict=False))
        for at in range(len(parts) - len(pattern_parts) + 1)
    )


def any_matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether one of the patterns matches the parameter that has these names."""
    return any(matches(pattern, name) for pattern in patterns for name in names)


def _well_formed(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        if not all(pattern.split(".")) or any(character.isspace() for character in pattern):
            raise ValueError(
                f"{pattern!r} is no pattern of names: give parts of a parameter's name between single dots, such as "
                "embed_tokens or layers.[0-3]"
            )
    if twice := sorted({pattern for pattern in patterns if patterns.count(pattern) > 1}):
        raise ValueError(f"names a pattern twice: {', '.join(twice)}")
    return patterns


NamePatterns = Annotated[Many[Text], AfterValidator(_well_formed)]
