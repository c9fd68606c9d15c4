"""The CustomResourceDefinition of TrainingJob, made from the models: a structural schema with defaults and CEL rules.

What CEL can't say (did the batch divide, is the preset known) the API and the operator say when they parse the spec.
`python -m muster.recipe.schema` prints it as JSON; a test compares it with the file in the chart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from muster.recipe.descriptions import describe
from muster.recipe.document import JobSpec
from muster.words.base import models_below
from muster.words.gang import QUANTITY
from muster.words.job import DURATION, MUTABLE
from muster.words.names import GROUP, KIND, VERSION
from muster.words.program import EVALUATIONS_ARE_THE_APIS
from muster.words.rules import DocumentRule, RuledSpec
from muster.words.status import JobStatus

Schema = dict[str, Any]

# Bounds where the models have none: CEL estimates a rule's cost from the largest document that the schema allows.
MAX_ITEMS = 256
MAX_KEYS = 128
MAX_LENGTH = 2_000
_KEPT = (
    "type",
    "enum",
    "default",
    "description",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "pattern",
)


def rules_of(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, DocumentRule[Any]]]:
    """Yield every rule of a model and of the models in its fields, with the path of the model that states it."""
    if issubclass(model, RuledSpec):
        yield from ((at, rule) for rule in model.rules)
    for path, inner in models_below(model):
        yield from rules_of(inner, f"{at}.{path}".removeprefix("."))


# What a field's type refuses, said again where kubectl can hear it: (path in the spec, CEL, message). What Muster's API
# alone can do is refused there and nowhere else.
_OF_TYPES: tuple[tuple[str, str, str], ...] = (
    ("program", "!has(self.after)", EVALUATIONS_ARE_THE_APIS),
    (
        "checkpoint",
        r"!has(self.uri) || self.uri.matches('^(/|file:///|file://localhost/|[sS]3://[A-Za-z0-9][A-Za-z0-9._-]+(/|$))')",
        "uri must be file:///an/absolute/path or s3://bucket/folder",
    ),
    (
        "training.data",
        "self.train.all(from, !from.source.matches('^(http|hf|gs|az|ftp)://'))",
        "a source is a path, a file://, s3:// or https:// address, or builtin://python-stdlib",
    ),
    (
        "runtime",
        "self.env.all(entry, !entry.name.startsWith('MUSTER_') && !entry.name.startsWith('PET_'))",
        "MUSTER_ and PET_ variables are set by Muster itself",
    ),
)
# All rules of the CRD.
RULES: tuple[tuple[str, str, str], ...] = (
    *((path, rule.cel, rule.text) for path, rule in rules_of(JobSpec) if rule.cel),
    *_OF_TYPES,
)

# Where people may write a number or something else, which a model's schema shows only after it was made alike.
INT_OR_STRING = {
    "gang.resources.cpu": QUANTITY,
    "gang.resources.memory": QUANTITY,
    "checkpoint.every": f"auto|{DURATION}",
    "training.model.from.step": "best|last",
    "training.distillation.teacher.from.step": "best|last",
    "training.grpo.rewardModel.from.step": "best|last",
    "program.inputs.*.step": "best|last",
}

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("Phase", "string", ".status.phase"),
    ("Ready", "integer", ".status.gang.ready"),
    ("Attempt", "integer", ".status.attempt"),
    ("Step", "integer", ".status.progress.step"),
    ("Restarts", "integer", ".status.restarts.total"),
    ("Queue", "string", r".metadata.labels.kueue\.x-k8s\.io/queue-name"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def definition() -> Schema:
    """The whole CustomResourceDefinition."""
    columns: list[Schema] = [{"name": name, "type": kind, "jsonPath": path} for name, kind, path in COLUMNS]
    columns.append({"name": "Because", "type": "string", "jsonPath": ".status.because", "priority": 1})
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"trainingjobs.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": "trainingjobs",
                "singular": "trainingjob",
                "shortNames": ["tj"],
                "categories": ["muster"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": document_schema()},
                }
            ],
        },
    }


def document_schema() -> Schema:
    """The structural schema of one TrainingJob."""
    spec = structural(JobSpec)
    for path, pattern in INT_OR_STRING.items():
        _retype(_at(spec, path), {"x-kubernetes-int-or-string": True, "minimum": 0, "pattern": f"^({pattern})$"})
    _retype(_at(spec, "gang.nodes"), _int_or_object(_at(spec, "gang.nodes")))
    _bound(spec)
    for path, rule, message in RULES:
        _at(spec, path).setdefault("x-kubernetes-validations", []).append({"rule": rule, "message": message})
    status = structural(JobStatus)
    _without_defaults(status)
    status["x-kubernetes-preserve-unknown-fields"] = True
    conditions = status["properties"]["conditions"]
    conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    conditions["items"]["required"] = ["type", "status"]
    _at(status, "ledger.seconds")["maxProperties"] = MAX_KEYS  # compared by a rule below
    return {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # A worker is named `<job>-<attempt>-<worker>`, and host names end at 63 characters.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 48}}},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": [_immutable(spec)],
    }


def structural(model: type[BaseModel]) -> Schema:
    """A model's JSON schema in the dialect of CRDs: no $ref, no null, no anyOf, no titles."""
    whole = model.model_json_schema(by_alias=True, mode="validation")
    describe(whole, model)
    return _structural(whole, whole.get("$defs", {}))


def _structural(node: Schema, definitions: Schema) -> Schema:
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    if "anyOf" in node:
        return _union(node, definitions)
    made: Schema = {key: node[key] for key in _KEPT if node.get(key) is not None}
    for key, limit, side in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        if key in node and node.get("type") == "integer":
            made[limit] = node[key] + side
        elif key in node:
            made |= {limit: node[key], key: True}  # OpenAPI 3.0's way of saying it
    if "default" in made:
        made["default"] = _plain(made["default"])
    if "const" in node:
        made |= {"type": "string", "enum": [node["const"]]}
    if "properties" in node:
        made["properties"] = {key: _structural(value, definitions) for key, value in node["properties"].items()}
        if required := node.get("required"):
            made["required"] = required
    elif node.get("type") == "object":
        values = node.get("additionalProperties")
        if isinstance(values, dict):
            made["additionalProperties"] = _structural(values, definitions)
        else:
            made["x-kubernetes-preserve-unknown-fields"] = True
    if node.get("type") == "array":
        made["items"] = _structural(node.get("items") or node["prefixItems"][0], definitions)
    if node.get("format") == "date-time":
        made["format"] = "date-time"
    if node.get("type") == "number":
        made["format"] = "double"
    if node.get("type") == "integer":
        made["format"] = "int64"
    return made


def _union(node: Schema, definitions: Schema) -> Schema:
    """`X | None` is an optional X; number or text is Kubernetes' int-or-string; anything else is left to the parser."""
    choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
    rest = {key: value for key, value in node.items() if key not in ("anyOf", "default")}
    default = {} if node.get("default") is None else {"default": node["default"]}
    if len(choices) == 1:
        return _structural({**choices[0], **rest, **default}, definitions)
    kinds = {choice.get("type") for choice in choices}
    described = {key: value for key, value in rest.items() if key == "description"}
    if kinds == {"integer", "string"}:
        return {"x-kubernetes-int-or-string": True, **described, **default}
    return {"x-kubernetes-preserve-unknown-fields": True, **described, **default}


def _plain(value: Any) -> Any:
    """A default without its nulls: a structural schema has no null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _bound(node: Schema) -> None:
    if node.get("type") == "array":
        node.setdefault("maxItems", MAX_ITEMS)
        _bound(node["items"])
    if node.get("type") == "string" and "enum" not in node:
        node.setdefault("maxLength", MAX_LENGTH)
    if "additionalProperties" in node:
        node.setdefault("maxProperties", MAX_KEYS)
        _bound(node["additionalProperties"])
    for inner in node.get("properties", {}).values():
        _bound(inner)


def _without_defaults(node: Schema) -> None:
    """The status is written whole by the operator; a default would put words in its mouth."""
    node.pop("default", None)
    node.pop("required", None)
    for inner in [*node.get("properties", {}).values(), node.get("items"), node.get("additionalProperties")]:
        if isinstance(inner, dict):
            _without_defaults(inner)


def _at(spec: Schema, path: str) -> Schema:
    """The schema of a field by its path; `*` stands for every value of a mapping, and no path for the spec itself."""
    node = spec
    for key in path.split(".") if path else ():
        node = node["additionalProperties"] if key == "*" else node["properties"][key]
    return node


def _retype(node: Schema, schema: Schema) -> None:
    kept = {key: node[key] for key in ("default", "description") if key in node}
    node.clear()
    node.update(kept | schema)


def _int_or_object(node: Schema) -> Schema:
    """A structural schema has no such type. But each bound speaks of one type alone, and of the others it says nothing:
    so text may have no characters, a list no items, a number lies between the bounds, and an object has both keys.
    """
    bounds = node["properties"]["min"]
    return {
        "x-kubernetes-preserve-unknown-fields": True,
        "minimum": bounds["minimum"],
        "maximum": bounds["maximum"],
        "multipleOf": 1,
        "minLength": 1,
        "maxLength": 0,
        "minItems": 1,
        "maxItems": 0,
        "required": ["min", "max"],
        "maxProperties": 2,
        "properties": node["properties"],
    }


def _immutable_keys() -> list[str]:
    return [field.alias or name for name, field in JobSpec.model_fields.items() if name not in MUTABLE]


def _immutable(spec: Schema) -> Schema:
    """A CRD's rules also run whenever a status is written, and comparing specs takes the API server a fifth of such a
    write. But one write changes either the spec or the status, whatever was asked for (the other is put back before
    rules run), and every new status of ours has new books. So what has new books has the old spec. A rule must not
    compare times: the old ones may be numbers of an earlier release, which is not the type that the schema gives them.
    """
    keys = _immutable_keys()
    given = {key for key in keys if key in spec.get("required", ()) or "default" in spec["properties"][key]}
    books = "self.status.ledger.seconds != oldSelf.status.ledger.seconds"
    writes_status = f"has(self.status) && (!has(oldSelf.status) || {books})"
    equal = {key: f"self.spec.{key} == oldSelf.spec.{key}" for key in keys}
    for key in set(keys) - given:  # CEL fails on a field that is not there, so its presence is compared first
        there, was_there = f"has(self.spec.{key})", f"has(oldSelf.spec.{key})"
        equal[key] = f"({there} == {was_there} && (!{there} || {equal[key]}))"
    same = " && ".join(equal[key] for key in keys)
    first = "".join(f"!({equal[key]}) ? '{key}' : " for key in keys[:-1]) + f"'{keys[-1]}'"
    fixed = "is fixed at submission: it decides what is computed or where; make a new job from this one"
    return {
        "rule": f"{writes_status} || ({same})",
        "message": f"it {fixed}",
        "messageExpression": f"({first}) + ' {fixed}'",
        "fieldPath": ".spec",
    }


if __name__ == "__main__":
    print(json.dumps(definition(), indent=1, ensure_ascii=False))
