"""A query parameter that no route knows is refused: `?dryrun=true` must not submit the job that it meant to try.

So is one that stands there twice and has one value: nobody knows which of the two was meant.
"""

from __future__ import annotations

import difflib
from typing import Any, get_args, get_origin

from fastapi import Request
from fastapi.routing import APIRoute

from muster.api.core.errors import ApiError
from muster.words.base import DocumentProblem


async def known_parameters_only(request: Request) -> None:
    """Raises ApiError invalid_parameter with a near word."""
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute):
        return
    names = [str(field.alias) for field in route.dependant.query_params]
    faults = tuple(_fault(name, names) for name in request.query_params if _whole(name) not in names)
    many = {str(field.alias) for field in route.dependant.query_params if _is_list(field.field_info.annotation)}
    for name in {name for name in names if name not in many and len(request.query_params.getlist(name)) > 1}:
        faults += (DocumentProblem(f"query.{name}", "is given more than once and has one value; say it once"),)
    if faults:
        raise ApiError("invalid_parameter", f"{faults[0]}", errors=faults)


def _whole(name: str) -> str:
    """Return `metadata` for `metadata[key]`, as OpenAI's clients write a mapping."""
    return "metadata" if name.startswith("metadata[") and name.endswith("]") else name


def _is_list(annotation: Any) -> bool:
    """Return whether the annotation is `list[str]` or `list[str] | None`."""
    return get_origin(annotation) is list or any(get_origin(part) is list for part in get_args(annotation))


def _fault(name: str, names: list[str]) -> DocumentProblem:
    folded = {word.lower(): word for word in names}
    near = difflib.get_close_matches(name.replace("_", "").lower(), folded, n=1, cutoff=0.6)
    return DocumentProblem(f"query.{name[:80]}", "unknown parameter", folded[near[0]] if near else None)
