"""The CustomResourceDefinition of TrainingJob, made from the models: a structural schema with defaults and CEL rules.

What CEL can't say (did the batch divide, is the preset known) the API and the operator say when they parse the spec.
`python -m muster.recipe.schema` prints it as JSON; a test compares it with the file in the chart.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from muster.recipe.architecture import PRESETS
from muster.recipe.data_formats import FORMATS
from muster.recipe.descriptions import describe
from muster.recipe.document import JobSpec
from muster.recipe.second_model import exactly_one
from muster.words.gang import QUANTITY
from muster.words.job import DURATION, MUTABLE, ONE_KIND_OF_WORK, ONLY_PROGRAMS_HAVE_FOLDERS
from muster.words.names import GROUP, KIND, VERSION
from muster.words.program import EVALUATIONS_ARE_THE_APIS
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

# Rules that the models state in Python, said again where kubectl can hear them: (path in the spec, CEL, message).
RULES: tuple[tuple[str, str, str], ...] = (
    ("", "has(self.training) != has(self.program)", ONE_KIND_OF_WORK),
    ("", "!has(self.checkpoint.folder) || has(self.program)", ONLY_PROGRAMS_HAVE_FOLDERS),
    ("program", "!has(self.after)", EVALUATIONS_ARE_THE_APIS),
    (
        "program.inputs.*",
        "has(self.source) != (has(self.job) || has(self.uri))",
        "name what it is by exactly one of job (or uri, a job's checkpoint folder) and source",
    ),
    (
        "training.model",
        "[has(self.preset), has(self.architecture), has(self.from), has(self.source)].filter(x, x).size() == 1",
        "give exactly one of preset, architecture, from, source",
    ),
    (
        "training.model",
        f"!has(self.preset) || self.preset in {json.dumps(sorted(PRESETS))}",
        f"unknown preset; there are {', '.join(PRESETS)}",
    ),
    ("training.model.from", "has(self.job) || has(self.uri)", "name the source: job or uri"),
    ("training.distillation.teacher", "has(self.source) != has(self.from)", exactly_one("teacher")),
    ("training.distillation.teacher.from", "has(self.job) || has(self.uri)", "name the source: job or uri"),
    (
        "training.grpo",
        "(has(self.verifiers) && self.verifiers.size() > 0) || has(self.rewardModel)",
        "nothing rewards the answers: give verifiers, rewardModel or both",
    ),
    ("training.grpo.rewardModel", "has(self.source) != has(self.from)", exactly_one("reward model")),
    ("training.grpo.rewardModel.from", "has(self.job) || has(self.uri)", "name the source: job or uri"),
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
        "training.length",
        "[has(self.steps), has(self.tokens), has(self.epochs)].filter(given, given).size() == 1",
        "give exactly one of steps, tokens, epochs",
    ),
    (
        "training.evaluation",
        "!(has(self.data) && self.data.size() > 0) || !(has(self.holdout) && self.holdout > 0.0)",
        "give either data (held-out sources) or holdout (a share of the training documents)",
    ),
    (
        "training.evaluation",
        "(has(self.data) && self.data.size() > 0) || (has(self.holdout) && self.holdout > 0.0)"
        " || (has(self.sets) && self.sets.size() > 0)",
        "give data, holdout or sets",
    ),
    ("training.parallel", "!has(self.replicas) || self.shard == 'hsdp'", "replicas is only for shard: hsdp"),
    (
        "training",
        "self.data.sequenceLength % self.parallel.context == 0",
        "parallel.context must divide data.sequenceLength",
    ),
    (
        "training",
        "self.parallel.context == 1 || (self.task != 'grpo' && !has(self.distillation) && !self.parallel.compile)",
        "parallel.context is not for task grpo, distillation or parallel.compile",
    ),
    (
        "training",
        "self.batch.tokensPerStep % (self.data.sequenceLength * self.batch.microBatch) == 0",
        "batch.tokensPerStep must be a multiple of data.sequenceLength × batch.microBatch",
    ),
    (
        "training",
        "!has(self.adapter) || has(self.model.from) || has(self.model.source)",
        "adapter needs a model to start from: another job's checkpoint (model.from) or a model's folder (model.source)",
    ),
    (
        "training",
        "!has(self.adapter) || self.adapter.kind != 'qlora' || has(self.model.source)",
        "adapter.kind qlora quantises the weights of a model's folder: give model.source, or use lora",
    ),
    (
        "training.adapter",
        "self.targets.size() > 0 || self.targetParameters.size() > 0",
        "targets names no layer, and targetParameters no weight",
    ),
    (
        "training.adapter",
        "self.targetParameters.size() == 0 || (self.kind != 'dora' && self.dropout == 0.0)",
        "targetParameters is for lora, rslora and qlora without dropout",
    ),
    (
        "training",
        f"self.data.train.all(source, source.format == 'auto' || source.format in {json.dumps(FORMATS)}[self.task])",
        "; ".join(f"task {task} reads {', '.join(formats)}" for task, formats in FORMATS.items()),
    ),
    (
        "gang",
        "self.gpusPerNode == 0 || !has(self.processesPerNode) || self.processesPerNode == self.gpusPerNode",
        "processesPerNode must equal gpusPerNode",
    ),
    (
        "runtime",
        "self.env.all(entry, !entry.name.startsWith('MUSTER_') && !entry.name.startsWith('PET_'))",
        "MUSTER_ and PET_ variables are set by Muster itself",
    ),
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
