"""The reference of the job's document: every key of `spec` with type, limits, unit, default, meaning and an example.

It is read off the models, as the CustomResourceDefinition is (`schema.py`), and shown by docs/job.md and by
`muster explain`. Three small tables hold what the models don't say: words for values of two types, units, and examples
where no default shows how a value is written. A test parses each example by the model of its key.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from muster.recipe.document import JobSpec
from muster.recipe.schema import Schema, structural
from muster.words.base import fold

# A larger bound only keeps sums within 64 bits (fields.py), and tells a reader nothing.
_BOUND_MAX: Final = 10**9
# The usual bound of a text (fields.Text), which nobody reaches.
_TEXT_MAX: Final = 2_000
_NAME: Final = "NAME"  # in place of `*` in an example where the table has no name of such a mapping

# Types of keys whose values may be of two kinds, by the end of the path.
_KINDS: Final = {
    "checkpoint.every": "a number of steps, a time (`90s`, `10m`, `2h`) or `auto`",
    ".step": "a step's number, `best` or `last`",
    "gang.nodes": "a whole number, or a range `{min, max}`",
    "resources.cpu": "a quantity of Kubernetes, as text or a whole number",
    "resources.memory": "a quantity of Kubernetes, as text or a whole number",
}
# Units by the last word of a key, for numbers only.
_UNITS: Final = (
    (re.compile(r"(seconds|Seconds|SecondsMax|SecondsAfterFinished)$"), "seconds"),
    (re.compile(r"Hours$"), "hours"),
    (re.compile(r"Megabytes$"), "MiB"),
    (
        re.compile(r"^(tokens|sequenceLength|tokensPerStep|maxPositions|originalMaxPositions)$|(min|max)Tokens$"),
        "tokens",
    ),
    (re.compile(r"^(steps|warmupSteps)$"), "steps"),
    (re.compile(r"^epochs$"), "epochs"),
    (re.compile(r"^(min|max)Words$|^ngram$"), "words"),
    (re.compile(r"^maxDocuments$"), "documents"),
    (re.compile(r"^(microBatch|samples|overfit)$"), "samples"),
)
# Values by the end of the path; the longest end that fits decides. A key that has a default needs none.
_EXAMPLES: Final[dict[str, Any]] = {
    # training
    "training.model": {"source": "hf://Qwen/Qwen3-8B@main"},
    "model.preset": "muster-15m",
    "architecture": {
        "dim": 512, "layers": 8, "heads": 8, "kvHeads": 4, "ffnDim": 1376, "vocabSize": 32000, "maxPositions": 2048,
    },
    "architecture.dim": 512,
    "architecture.layers": 8,
    "architecture.heads": 8,
    "architecture.kvHeads": 4,
    "architecture.ffnDim": 1376,
    "architecture.vocabSize": 32000,
    "architecture.maxPositions": 2048,
    "ropeScaling.factor": 8,
    "model.source": "s3://models/qwen3-8b",
    "teacher.source": "s3://models/qwen3-32b",
    "rewardModel.source": "s3://models/judge",
    "from.job": "my-model",
    "from.uri": "s3://checkpoints/my-model/0f6b2c1e-8a0d-4a57-9c35-2b9c8f4d7e11",
    "adapter": {"kind": "lora", "rank": 16, "targets": ["all-linear"]},
    "adapter.targets": ["all-linear"],
    "adapter.targetParameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "adapter.modulesToSave": ["embed_tokens", "lm_head"],
    "training.freeze": ["embed_tokens", "layers.[0-3]"],
    "training.optimizer": {"lr": 2e-5, "schedule": {"name": "cosine", "warmupSteps": 20}},
    "optimizer.schedule": {"name": "wsd", "warmupSteps": 100, "decayFraction": 0.2},
    "schedule.warmupSteps": 100,
    "schedule.cycles": 1,
    "groups[]": {"parameters": ["embed_tokens"], "lr": 1e-4},
    "groups[].parameters": ["embed_tokens"],
    "groups[].lr": 1e-4,
    "groups[].weightDecay": 0.0,
    "batch.tokensPerStep": 65536,
    "batch.microBatch": 4,
    "parallel": {"shard": "fsdp", "activationCheckpointing": "full"},
    "parallel.replicas": 2,
    "training.length": {"epochs": 3},
    "length.steps": 2000,
    "length.tokens": 1_000_000_000,
    "length.epochs": 3,
    "training.routerAuxLossCoef": 0.001,
    "training.neftuneNoiseAlpha": 5,
    "training.grpo": {"verifiers": [{"numericAnswer": {"after": "####"}}]},
    "grpo.epsilonHigh": 0.28,
    "rewardModel": {"source": "s3://models/judge"},
    "teacher": {"source": "s3://models/qwen3-32b"},
    "distillation": {"teacher": {"source": "s3://models/qwen3-32b"}, "weight": 0.5},
    # training.data
    ".source": "data/chats.jsonl",
    "data[].source": "data/held-out.jsonl",
    ".columns": {"prompt": "question", "completion": "answer"},
    "columns.messages": "dialogue",
    "columns.tools": "functions",
    "columns.conversations": "turns",
    "columns.system": "system_prompt",
    "columns.instruction": "task",
    "columns.input": "context",
    "columns.output": "response",
    "columns.prompt": "question",
    "columns.completion": "answer",
    "columns.chosen": "better",
    "columns.rejected": "worse",
    "columns.margin": "score_difference",
    "columns.label": "is_good",
    "[].epochs": 2,
    "[].maxDocuments": 10000,
    "[].maxTokens": 50_000_000,
    "[].name": "support",
    "data.addTokens": ["<|think|>", "<|/think|>"],
    "data.chatTemplate": "templates/chat.jinja",
    "data.chatTemplateName": "tool_use",
    "data.temperature": 3,
    "data.overfit": 16,
    "data.tokenizer": "s3://models/qwen3-8b",
    "curation": {"exactDuplicates": True},
    "curation.length": {"minTokens": 16},
    "length.minTokens": 16,
    "length.maxTokens": 32768,
    "curation.dropMatching": ["(?i)lorem ipsum"],
    # training.evaluation
    "training.evaluation": {"every": 50, "holdout": 0.02},
    "evaluation.every": 50,
    "evaluation.holdout": 0.02,
    "sets.*.samples": 256,
    "evaluation.sets": {"support": {"data": [{"source": "data/support-test.jsonl"}]}},
    "sets.*.data": [{"source": "data/support-test.jsonl"}],
    "answers": {"verifiers": [{"exactMatch": {}}]},
    "verifiers[]": {"exactMatch": {"ignoreCase": True}},
    "exactMatch.after": "####",
    "numericAnswer.after": "####",
    "regex": {"pattern": "^(yes|no)$"},
    "regex.pattern": "^(yes|no)$",
    "regex.column": "expression",
    "jsonSchema": {"schema": '{"type": "object"}'},
    "jsonSchema.schema": '{"type": "object"}',
    "jsonSchema.column": "schema",
    "verifiers[].name": "exact",
    "earlyStopping": {"patience": 3},
    "earlyStopping.patience": 3,
    "evaluation.metric": "perplexity",
    "generate": {"prompts": ["What is a gradient?"]},
    "generate.prompts": ["What is a gradient?"],
    # program
    "program": {"command": ["python", "train.py"], "source": "."},
    "program.command": ["python", "train.py", "--lr", "1e-4"],
    "program.source": ".",
    "program.inputs": {"base": {"source": "s3://models/qwen3-8b"}},
    "program.after": {"job": "my-model", "each": "kept"},
    "program.after.job": "my-model",
    "program.after.uri": "s3://checkpoints/my-model/0f6b2c1e-8a0d-4a57-9c35-2b9c8f4d7e11",
    "inputs.*": {"source": "s3://models/qwen3-8b"},
    "inputs.*.source": "s3://models/qwen3-8b",
    "inputs.*.job": "my-model",
    "inputs.*.uri": "s3://checkpoints/my-model/0f6b2c1e-8a0d-4a57-9c35-2b9c8f4d7e11",
    "program.hang": {"silentSeconds": 1800},
    "hang.silentSeconds": 1800,
    "hang.stepSeconds": 600,
    "program.steps": 2000,
    # gang
    "gang": {"nodes": 1, "gpusPerNode": 8},
    "gang.nodes": 2,
    "nodes.min": 2,
    "nodes.max": 4,
    "gang.gpusPerNode": 8,
    "gang.processesPerNode": 4,
    "gang.instanceTypes": ["p5.48xlarge"],
    "resources.cpu": "90",
    "resources.memory": "900Gi",
    "capacity": {"prefer": "spot"},
    "scheduler": {"kind": "kueue", "queue": "research"},
    "scheduler.queue": "research",
    "topology": {"preferred": "topology.kubernetes.io/zone"},
    "topology.required": "topology.kubernetes.io/zone",
    "topology.preferred": "topology.kubernetes.io/zone",
    "network.nccl": {"NCCL_DEBUG": "INFO"},
    "deviceClasses": {"gpus": "gpu.nvidia.com"},
    "deviceClasses.gpus": "gpu.nvidia.com",
    "deviceClasses.efa": "efa.networking.k8s.aws",
    # checkpoint, recovery, tracking
    "checkpoint": {"uri": "s3://checkpoints/my-model", "every": "10m", "keep": {"last": 3, "best": 1}},
    "checkpoint.uri": "s3://checkpoints/my-model",
    "checkpoint.every": "10m",
    "keep.every": 1000,
    "checkpoint.folder": "output",
    "checkpoint.kmsKeyId": "alias/training",
    "recovery": {"budgets": {"hang": 10}},
    "recovery.budgets": {"hang": 10},
    "recovery.preflight": {"disk": "exclude"},
    "tracking": {"tensorboard": True},
    "wandb": {"project": "assistants", "mode": "offline"},
    "wandb.project": "assistants",
    "wandb.entity": "my-team",
    "wandb.url": "https://wandb.example.com",
    "mlflow": {"url": "https://mlflow.example.com", "experiment": "assistants"},
    "mlflow.url": "https://mlflow.example.com",
    "mlflow.experiment": "assistants",
    # runtime and the rest
    "runtime": {"env": [{"name": "HF_HUB_OFFLINE", "value": "1"}]},
    "runtime.image": "registry.example.com/trainer:1.0",
    "runtime.nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations[]": {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    "tolerations[].key": "nvidia.com/gpu",
    "tolerations[].value": "present",
    "tolerations[].effect": "NoSchedule",
    "tolerations[].tolerationSeconds": 300,
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]
            }
        }
    },
    "matchExpressions[].key": "topology.kubernetes.io/zone",
    "matchExpressions[]": {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a", "b"]},
    "matchExpressions[].operator": "In",
    "matchExpressions[].values": ["a", "b"],
    "preferredDuringSchedulingIgnoredDuringExecution[].weight": 50,
    "runtime.labels": {"team": "nlp"},
    "runtime.annotations": {"example.com/owner": "nlp"},
    "runtime.imagePullSecrets": ["registry"],
    "env[].name": "HF_HUB_OFFLINE",
    "env[].value": "1",
    "env[].valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
    "secretKeyRef.name": "hub",
    "secretKeyRef.key": "token",
    "configMapKeyRef.name": "settings",
    "configMapKeyRef.key": "region",
    "runtime.envFrom": [{"secretRef": {"name": "hub"}}],
    "runtime.volumes": [{"name": "scratch", "emptyDir": {}}],
    "runtime.serviceAccountName": "trainer",
    "priorityClassName": "research",
    "cancelReason": "stopped by sweep rates: place 4 of 5 at step 200; 2 went on",
    "priority": 10,
    "activeDeadlineSeconds": 86400,
    "ttlSecondsAfterFinished": 604800,
}  # fmt: skip


@dataclass(frozen=True)
class DocumentKey:
    """A key of the job's document. In its path `[]` stands for each item of a list, `*` for each name of a mapping."""

    path: str  # within `spec`
    kind: str  # words for its type: `whole number`, `one of lora, dora`
    limits: str  # words for its bounds; empty where there are none
    unit: str  # empty where a value has none
    required: bool  # wherever the section around it is given
    default: Any  # None where it has none
    meaning: str
    example: Any
    keys: tuple[str, ...] = ()  # names of the keys below it, where it is a section

    @property
    def name(self) -> str:
        """Return the key as it is written in its section."""
        return self.path.rpartition(".")[2].removesuffix("[]")

    @property
    def facts(self) -> str:
        """Return type, limits, unit, and what holds where the key is left out, as one line."""
        facts = [self.kind, self.limits, f"in {self.unit}" if self.unit else ""]
        if self.required:
            facts.append("required")
        elif self.default is not None and self.default not in ("", [], {}):
            facts.append(f"default `{flow(self.default)}`")
        return ", ".join(fact for fact in facts if fact)


@functools.cache
def job_reference() -> dict[str, DocumentKey]:
    """Return every key by its path, in the order of the models; a section comes before its keys. Takes a moment: the
    meanings are read from the source of the models."""
    spec = structural(JobSpec)
    keys: dict[str, DocumentKey] = {}
    for name, node in spec["properties"].items():
        _collect(keys, name, node, required=False)
    return keys


def look_up(words: str) -> tuple[DocumentKey, ...]:
    """Return the key at a path, or else every key whose path ends with it. `spec.`, indices and the case don't matter,
    and names of a mapping stand for all of them: `spec.training.data.train[0].format`, `warmup_steps`."""
    keys = job_reference()
    asked = [fold(part) for part in re.sub(r"\[\w*\]", "", words.strip(" .")).split(".")]
    if asked[0] == "spec" and len(asked) > 1:
        asked = asked[1:]
    for path in (asked, asked[:-1]):  # `recovery.budgets.hang` is explained by its mapping
        whole = [key for key in keys.values() if path and _fits(path, _parts(key.path))]
        if whole and (path is asked or whole[0].kind.startswith("mapping")):
            return (whole[0],)
    return tuple(
        key
        for key in keys.values()
        if not key.path.endswith(("[]", "*")) and _fits(asked, _parts(key.path)[-len(asked) :])
    )


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(inner) for inner in value) + "]"
    return _scalar(value)


def example_lines(key: DocumentKey) -> list[str]:
    """Return the key's example as lines of a job's document, from `spec:` down."""
    lines, pad, dash = ["spec:"], "  ", ""
    *above, last = _parts(key.path, lists=True)
    for part in above:
        name = _NAME if part == "*" else part.removesuffix("[]")
        lines.append(f"{pad}{dash}{name}:")
        pad += "  " * (2 if dash else 1)
        dash = "- " if part.endswith("[]") else ""
    if last.endswith("[]"):  # an item of a list
        lines.append(f"{pad}{dash}{last.removesuffix('[]')}:")
        return [*lines, f"{pad}{'    ' if dash else '  '}- {flow(key.example)}"]
    name = _NAME if last == "*" else last
    return [*lines, *_block(name, key.example, pad, dash)]


def _block(name: str, value: Any, pad: str, dash: str = "") -> Iterator[str]:
    inner = pad + ("    " if dash else "  ")
    if isinstance(value, dict) and value and any(isinstance(each, dict | list) for each in value.values()):
        yield f"{pad}{dash}{_scalar(name)}:"
        for key, each in value.items():
            yield from _block(key, each, inner)
    else:
        yield f"{pad}{dash}{_scalar(name)}: {flow(value)}"


def _parts(path: str, lists: bool = False) -> list[str]:
    return path.split(".") if lists else [part.removesuffix("[]") for part in path.split(".")]


def _fits(asked: list[str], parts: list[str]) -> bool:
    return len(asked) == len(parts) and all(
        part == "*" or fold(part) == word for word, part in zip(asked, parts, strict=True)
    )


def _collect(keys: dict[str, DocumentKey], path: str, node: Schema, required: bool) -> Any:
    """Add the key and all below it; return its example."""
    keys[path] = placeholder = DocumentKey(path, "", "", "", required, None, "", None)
    properties, needed = node.get("properties", {}), node.get("required", [])
    below = {name: _collect(keys, f"{path}.{name}", inner, name in needed) for name, inner in properties.items()}
    example: Any = None
    for inner, suffix in ((node.get("items"), "[]"), (node.get("additionalProperties"), ".*")):
        if inner and "properties" in inner:
            one = _collect(keys, f"{path}{suffix}", inner, False)
            example = [one] if suffix == "[]" else {_NAME: one}
    if below and example is None:
        example = {name: below[name] for name in needed} or dict(list(below.items())[:1])
    keys[path] = DocumentKey(
        placeholder.path,
        _kind(path, node),
        _limits(node),
        _unit(path, node),
        required,
        None if below and path not in _KINDS else node.get("default"),
        _meaning(path, node),
        _example(path, node, example),
        tuple(below),
    )
    return keys[path].example


def _kind(path: str, node: Schema) -> str:
    for end, words in _KINDS.items():
        if path.endswith(end):
            return words
    if "enum" in node:
        choices = [f"`{choice}`" for choice in node["enum"]]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if "properties" in node:
        return "section"
    if node.get("type") == "array":
        items = node["items"]
        return "list of sections" if "properties" in items else f"list of {_plural(_kind(f'{path}[]', items))}"
    if isinstance(values := node.get("additionalProperties"), dict):
        return f"mapping of names to {'sections' if 'properties' in values else _plural(_kind(f'{path}.*', values))}"
    kinds = {"boolean": "true or false", "integer": "whole number", "number": "number", "string": "text"}
    return kinds.get(str(node.get("type")), "mapping")


def _plural(kind: str) -> str:
    plurals = {"text": "texts", "number": "numbers", "whole number": "whole numbers", "mapping": "mappings"}
    return plurals.get(kind, kind)


def _limits(node: Schema) -> str:
    limits = []
    for bound, exclusive, words, strict in (
        ("minimum", "exclusiveMinimum", "at least", "more than"),
        ("maximum", "exclusiveMaximum", "at most", "less than"),
    ):
        value = node.get(bound)
        if value is not None and abs(value) < _BOUND_MAX:
            limits.append(f"{strict if node.get(exclusive) else words} {_number(value)}")
    if node.get("type") == "array":
        least, most = node.get("minItems") or node.get("minLength"), node.get("maxItems")
        if least and least == most:
            return f"exactly {least}"
        limits += [f"at least {least}"] if least else []
        limits += [f"at most {most}"] if most else []
    if node.get("type") == "string" and node.get("maxLength", _TEXT_MAX) > _TEXT_MAX:
        limits.append(f"at most {node['maxLength']:,} characters")
    if "pattern" in node and "enum" not in node:
        limits.append(f"like `{node['pattern']}`")
    return ", ".join(limits)


def _unit(path: str, node: Schema) -> str:
    if node.get("type") not in ("integer", "number"):
        return ""
    name = path.rpartition(".")[2]
    return "steps" if path.endswith("evaluation.every") else next((u for end, u in _UNITS if end.search(name)), "")


def _meaning(path: str, node: Schema) -> str:
    if node.get("description"):
        return str(node["description"])
    within = node.get("items") or node.get("additionalProperties") or {}
    assert within.get("description"), f"{path} has no text below its field"
    return str(within["description"])


def _example(path: str, node: Schema, given: Any) -> Any:
    ends = [end for end in _EXAMPLES if path == end or path.endswith(end if end.startswith((".", "[")) else f".{end}")]
    if ends:
        return _EXAMPLES[max(ends, key=len)]
    if given is not None:
        return given
    default = node.get("default")
    if node.get("type") == "boolean":
        return not default
    if "enum" in node:
        return next(choice for choice in node["enum"] if choice != default)
    assert default not in (None, "", [], {}), f"{path} has no default, so it needs an example in reference.py"
    return default


# What YAML 1.2 would not read as text, or not as one scalar, is quoted.
_BARE: Final = re.compile(r"[A-Za-z_./][\w./@:+-]*")
_NOT_TEXT: Final = frozenset(("true", "false", "null", "yes", "no", "on", "off", ".", ".inf", ".nan"))


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _number(value)
    if _BARE.fullmatch(value) and value.lower() not in _NOT_TEXT and not value.endswith(":"):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")
