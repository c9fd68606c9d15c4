"""Additions to the OpenAPI document that FastAPI can't derive: problems, the TrainingJob as a request body,
examples."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from muster.api.core.errors import KINDS, MEDIA_TYPE, ApiError, problem_body
from muster.words.base import DocumentProblem

_REF = "#/components/schemas/{model}"
AT = 1_795_000_000.0  # when examples happen, in seconds since the epoch
UID = "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"  # of the example job
EXAMPLE_JOB: dict[str, Any] = {
    "apiVersion": "muster.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "stdlib-60m", "labels": {"team": "nlp"}},
    "spec": {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
            "batch": {"tokensPerStep": 16_384, "microBatch": 8},
            "length": {"steps": 200},
            "evaluation": {"every": 50, "holdout": 0.05},
        },
        "gang": {"nodes": 2},
        "checkpoint": {"every": 20},
    },
}


def problems(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route, for its `responses`; every route may also fail with 401, 403 and 5xx."""
    responses: dict[int | str, dict[str, Any]] = {}
    for code in (
        *codes,
        "unauthorized",
        "forbidden",
        "invalid_parameter",
        "rate_limited",
        "internal",
        "database_unavailable",
    ):
        status = KINDS[code].status
        response = responses.setdefault(
            status, {"description": "", "content": {MEDIA_TYPE: {"schema": _PROBLEM_REF, "examples": {}}}}
        )
        response["content"][MEDIA_TYPE]["examples"][code] = {"value": _example(code)}
        titles = [KINDS[name].title for name in response["content"][MEDIA_TYPE]["examples"]]
        response["description"] = "; ".join(titles)
    return responses


_PROBLEM_REF = {"$ref": _REF.format(model="Problem")}


def _example(code: str) -> dict[str, Any]:
    faults = (
        (DocumentProblem("spec.training.optimizer.learningRate", "unknown key", "lr"),) if code == "invalid_job" else ()
    )
    return problem_body(ApiError(code, KINDS[code].advice, errors=faults), "/api/v1/jobs", "8c0a4c3c9f3b4d0f")


_BODIES: dict[str, type[BaseModel]] = {}  # models of the bodies that routes read by themselves, as they are declared


def body(model: type[BaseModel], example: Any, required: bool = True, note: str = "") -> dict[str, Any]:
    """A request body that the route reads by itself, as JSON or YAML."""
    _BODIES[model.__name__] = model
    content = {"schema": {"$ref": _REF.format(model=model.__name__)}, "example": example}
    content_types = {"application/json": content, "application/yaml": content}
    return {"requestBody": {"required": required, "description": note, "content": content_types}}


def example_reply(example: Any, description: str = "") -> dict[str, Any]:
    """A response with an example."""
    return {"description": description, "content": {"application/json": {"example": example}}}


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` return the whole schema, which is built once."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
        servers=app.servers,
        separate_input_output_schemas=False,
    )
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for model in _BODIES.values():
        body_schema = model.model_json_schema(ref_template=_REF)
        for name, made in (*body_schema.pop("$defs", {}).items(), (model.__name__, body_schema)):
            same = (
                name not in schemas or schemas[name].get("properties", {}).keys() == made.get("properties", {}).keys()
            )
            assert same, f"two models are called {name}, and a description has one of each name"
            schemas[name] = made
    schemas["Problem"] = _PROBLEM
    _describe_other_inputs(schemas)
    for made in schemas.values():
        _describe_defaults(made)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for path in schema["paths"].values():
        for operation in path.values():
            _problems_only(operation)
    # Through JSON once, so that enumerations and tuples are what a reader of the document sees.
    complete: dict[str, Any] = json.loads(json.dumps(schema))
    return complete


def _describe_other_inputs(schemas: dict[str, Any]) -> None:
    """Short forms that the contract's validators turn into the long ones that the generated schema shows."""
    gang, resources = schemas["Gang"]["properties"], schemas["Resources"]["properties"]
    nodes = {key: value for key, value in gang["nodes"].items() if key != "$ref"}
    number = {"type": "integer", "minimum": 1, "maximum": 10_000}
    gang["nodes"] = {**nodes, "anyOf": [number, {"$ref": _REF.format(model="Nodes")}]}
    for quantity in resources.values():
        quantity["anyOf"] = [{"type": "integer"}, *quantity["anyOf"]]


def _describe_defaults(node: Any) -> None:
    """Say defaults in words. Generators of clients take a key with a default for one that must be sent, and refuse one
    that is a mapping or stands alongside a $ref; the server fills them in.
    """
    if isinstance(node, list):
        for item in node:
            _describe_defaults(item)
    if not isinstance(node, dict):
        return
    if (default := node.pop("default", None)) is not None:
        words = f"Default: `{json.dumps(default, ensure_ascii=False)}`."
        node["description"] = f"{node['description']} {words}" if "description" in node else words
    for key, value in node.items():
        for inner in value.values() if key == "properties" else [value]:
            _describe_defaults(inner)


def _problems_only(operation: dict[str, Any]) -> None:
    """FastAPI promises its own 422; ours is a problem like all others."""
    reply = operation["responses"].get("422", {})
    if "HTTPValidationError" in json.dumps(reply):
        operation["responses"]["422"] = problems("invalid_parameter")[422]


_TEXT = {"type": "string"}
_PROBLEM: dict[str, Any] = {
    "title": "Problem",
    "description": "RFC 9457, with a stable `code`; `error` says the same to clients made for OpenAI's API.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "instance", "requestId", "errors", "error"],
    "properties": {
        "type": {**_TEXT, "description": "Where the code is explained."},
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": {**_TEXT, "description": "Cause, place and next step."},
        "code": {**_TEXT, "enum": sorted(KINDS)},
        "instance": _TEXT,
        "requestId": _TEXT,
        "jobId": {**_TEXT, "description": "The job in the way, where there is one."},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["path", "message"],
                "properties": {
                    "path": _TEXT,
                    "message": _TEXT,
                    "didYouMean": _TEXT,
                    "line": {"type": "integer", "description": "In the body as it was sent, from 1."},
                    "column": {"type": "integer"},
                },
            },
        },
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": _TEXT},
        },
    },
}
