"""The keys of a job's document as its page completes them: a tree with values and a sentence each. Pure."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from muster.recipe.document import JobSpec
from muster.recipe.schema import structural
from muster.words.names import API_VERSION, KIND, Label

_ABOUT_MAX = 140
_WHOLE: dict[str, Any] = {
    "apiVersion": {"values": [API_VERSION]},
    "kind": {"values": [KIND]},
    "metadata": {
        "about": "The job's name and labels",
        "keys": {
            "name": {"about": "Lower-case letters, digits and '-', at most 48"},
            "labels": {"keys": {str(Label.PROJECT): {"about": "The project that owns the job"}}},
        },
    },
}


@cache
def job_keys() -> bytes:
    """JSON: {"keys": {name: {"about"?, "values"?, "keys"?}}}; what is in a list stands at the list's own key."""
    tree = {"keys": {**_WHOLE, "spec": _node(structural(JobSpec))}}
    return json.dumps(tree, separators=(",", ":")).encode()


def _node(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") == "array":
        return _about(schema) | _node(schema["items"])
    node = _about(schema)
    if properties := schema.get("properties"):
        node["keys"] = {name: _node(each) for name, each in properties.items()}
    if schema.get("type") == "boolean":
        node["values"] = ["true", "false"]
    elif values := schema.get("enum"):
        node["values"] = [str(value) for value in values]
    return node


def _about(schema: dict[str, Any]) -> dict[str, Any]:
    """The first sentence of the description."""
    words = " ".join(str(schema.get("description") or "").split()).split(". ")[0].rstrip(".")
    return {"about": words if len(words) <= _ABOUT_MAX else words[: _ABOUT_MAX - 1] + "…"} if words else {}
