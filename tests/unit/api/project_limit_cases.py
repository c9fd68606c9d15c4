"""What jobs of a project may name, as one table that the API's Python and the chart's CEL are both held to.

Python (contract/projects.py) is held to it by test_api_project_limits.py, CEL (helm/muster/templates/policy.yaml)
on a real API server by tests/cluster/test_cluster_project_limits.py.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from muster.api.core.cluster_objects import CLAIM_PATHS, SECRET_PATHS
from muster.api.core.limits import ProjectLimits

LIMITS = ProjectLimits(
    gang_sizes=(1, 2, 4),
    instance_types=("p5.48xlarge", "p5e.48xlarge"),
    images=("registry.example.com/trainer:1", "registry.example.com/team/*"),
    data_prefixes=("s3://data/nlp/", "file:///data/nlp", "https://data.example.com/nlp", "hf://nlp/model"),
    checkpoint_prefix="s3://checkpoints/nlp",
    endpoints=("https://wandb.example.com",),
    service_account="nlp",
    service_accounts=("nlp-writer",),
    secrets=("s3", "team-*"),
    claims=("data",),
    kms_key_id="arn:aws:kms:eu-central-1:111122223333:key/nlp",
)
WELL: dict[str, Any] = {
    "suspend": True,
    "training": {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 64 * 12},
        "length": {"steps": 30},
    },
    "gang": {"nodes": 2, "instanceTypes": ["p5.48xlarge"]},
    "checkpoint": {"uri": "s3://checkpoints/nlp/mine", "kmsKeyId": LIMITS.kms_key_id},
}


@dataclass(frozen=True)
class Case:
    """A change of WELL, as a merge patch (RFC 7396), and the field at which the API refuses it; None if it lets it in.

    `stricter` marks what the API lets in and the policy refuses, for CEL can't work it out (docs/sharing.md).
    """

    change: dict[str, Any]
    refused: str | None = None
    stricter: str | None = None
    only_api: bool = False
    """The field is for the API alone: a cluster refuses it in any document."""

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = merged(WELL, self.change)
        return found

    @property
    def refused_by_policy(self) -> str | None:
        """The place that the policy names, which is coarser."""
        place = self.refused or self.stricter
        if place is None:
            return None
        if place in SECRET_PLACES:
            return "spec.runtime"
        coarser = ("spec.training", "spec.program", "spec.runtime.env", "spec.runtime.volumes")
        return next((coarse for coarse in coarser if place.startswith(coarse)), place)

    @property
    def id(self) -> str:
        return re.sub(r"[^\w./:%@-]+", " ", str(self.change)).strip()[:80] or "as it is"


def merged(into: Any, change: Any) -> Any:
    if not isinstance(change, dict) or not isinstance(into, dict):
        return copy.deepcopy(change)
    found = {key: copy.deepcopy(value) for key, value in into.items() if change.get(key, value) is not None}
    return found | {key: merged(found.get(key), value) for key, value in change.items() if value is not None}


def _train(source: str) -> dict[str, Any]:
    return {"training": {"data": {"train": [{"source": source}]}}}


def _evaluation(**parts: Any) -> dict[str, Any]:
    return {"training": {"evaluation": {"every": 5, **parts}}}


def _distilled(**teacher: Any) -> dict[str, Any]:
    return {"training": {"distillation": {"teacher": teacher}}}


def _rewarded(**scorer: Any) -> dict[str, Any]:
    policy = {"preset": None, "from": {"uri": "s3://checkpoints/nlp/job"}}
    grpo = {"rewardModel": scorer, "completions": 2, "maxTokens": 8}
    return {"training": {"task": "grpo", "model": policy, "grpo": grpo}}


def _model(**parts: Any) -> dict[str, Any]:
    return {"training": {"model": {"preset": None, **parts}}}


def _endpoint(value: str) -> dict[str, Any]:
    return {"runtime": {"env": [{"name": "WANDB_BASE_URL", "value": value}]}}


def _at(place: str, name: str) -> Any:
    """The document in which `place`, such as `volumes[0].secret.secretName`, holds the name."""
    found: Any = name
    for key in reversed(place.replace("[0]", ".0").split(".")):
        found = [found] if key == "0" else {key: found}
    return found


def _named(place: str, name: str) -> dict[str, Any]:
    runtime = _at(place.removeprefix("spec.runtime."), name)
    for entry in (*runtime.get("volumes", ()), *runtime.get("env", ())):
        entry["name"] = "named" if "env" not in runtime else "NAMED"
    for entry in runtime.get("env", ()):
        entry["valueFrom"]["secretKeyRef"]["key"] = "key"
    return {"runtime": runtime}


def _program(**parts: Any) -> dict[str, Any]:
    return {"training": None, "program": {"command": ["train.py"], **parts}}


def _input(**parts: Any) -> dict[str, Any]:
    return _program(inputs={"base": parts})


OWN_SECRET = "own"
"""A secret of the project's own (`muster secrets`), which is not among its limits."""
SECRET_PLACES = (
    "spec.runtime.imagePullSecrets[0]",
    "spec.runtime.envFrom[0].secretRef.name",
    "spec.runtime.env[0].valueFrom.secretKeyRef.name",
    "spec.runtime.volumes[0].projected.sources[0].secret.name",
    *(f"spec.runtime.volumes[0].{'.'.join(keys)}" for keys in SECRET_PATHS),
)
CLAIM_PLACES = tuple(f"spec.runtime.volumes[0].{'.'.join(keys)}" for keys in CLAIM_PATHS)
_FIRST = "spec.training.data.train[0].source"
_TEACHER = "spec.training.distillation.teacher"
_SCORER = "spec.training.grpo.rewardModel"
_SET = "spec.training.evaluation.sets.cv.data[0].source"
_ENDPOINT = "spec.runtime.env[0].value"
_ELASTIC = {"gang": {"nodes": {"min": 1, "max": 4}}}

CASES = (
    Case({}),
    # Gangs.
    Case({"gang": {"nodes": 1}}),
    Case({"gang": {"nodes": 3}}, "spec.gang.nodes"),
    Case({"gang": {"nodes": {"min": 1, "max": 2}}}),
    Case(_ELASTIC, "spec.gang.nodes"),
    # Of 4 samples no gang of 3 can be made.
    Case(_ELASTIC | {"training": {"batch": {"tokensPerStep": 256}}}, None, "spec.gang.nodes"),
    Case({"gang": {"instanceTypes": ["p5e.48xlarge", "p5.48xlarge"]}}),
    Case({"gang": {"instanceTypes": ["p5.48xlarge", "p4d.24xlarge"]}}, "spec.gang.instanceTypes"),
    Case({"gang": {"instanceTypes": []}}, None, "spec.gang.instanceTypes"),
    # What runs.
    Case({"runtime": {"image": "registry.example.com/trainer:1"}}),
    Case({"runtime": {"image": "registry.example.com/trainer:10"}}, "spec.runtime.image"),
    Case({"runtime": {"image": "registry.example.com/team/mine:7"}}),
    Case({"runtime": {"image": "registry.example.com/teams/mine:7"}}, "spec.runtime.image"),
    Case({"runtime": {"serviceAccountName": "nlp"}}),
    Case({"runtime": {"serviceAccountName": "nlp-writer"}}),
    Case({"runtime": {"serviceAccountName": "nlp-writer-2"}}, "spec.runtime.serviceAccountName"),
    Case({"runtime": {"serviceAccountName": "admin"}}, "spec.runtime.serviceAccountName"),
    # Secrets and claims of the namespace, wherever a pod's spec can name one.
    *(Case(_named(place, name)) for place in SECRET_PLACES for name in ("s3", "team-hub", OWN_SECRET)),
    *(Case(_named(place, name), place) for place in SECRET_PLACES for name in ("muster", "s3-too")),
    *(Case(_named(place, "data")) for place in CLAIM_PLACES),
    *(Case(_named(place, "other"), place) for place in CLAIM_PLACES),
    Case({"runtime": {"volumes": [{"name": "x", "emptyDir": {}}, {"name": "y", "configMap": {"name": "any"}}]}}),
    Case({"runtime": {"volumes": [{"name": "x", "projected": {"sources": [{"configMap": {"name": "any"}}]}}]}}),
    # Where it commits.
    Case({"checkpoint": {"uri": "s3://checkpoints/nlp"}}),
    Case({"checkpoint": {"uri": "s3://checkpoints/nlp/"}}),
    Case({"checkpoint": {"uri": "s3://checkpoints/nlp-too"}}, "spec.checkpoint.uri"),
    Case({"checkpoint": {"uri": "s3://checkpoints/nlp/../cv"}}, "spec.checkpoint.uri"),
    Case({"checkpoint": {"uri": "s3://checkpoints/nlp/%2e%2E/cv"}}, "spec.checkpoint.uri"),
    Case({"checkpoint": {"uri": "s3://other/nlp"}}, "spec.checkpoint.uri"),
    Case({"checkpoint": {"uri": "file:///checkpoints/nlp"}}, "spec.checkpoint.uri"),
    Case({"checkpoint": {"uri": None}}, None, "spec.checkpoint.uri"),
    Case({"checkpoint": {"kmsKeyId": "alias/cv"}}, "spec.checkpoint.kmsKeyId"),
    Case({"checkpoint": {"kmsKeyId": None}}, None, "spec.checkpoint.kmsKeyId"),
    Case({"checkpoint": {"uri": "S3://checkpoints/nlp/mine"}}, None, "spec.checkpoint.uri"),
    # What it reads.
    *(Case(_train(source)) for source in (
        "s3://data/nlp", "s3://data/nlp/x.jsonl", "s3://checkpoints/nlp/x.jsonl", "file:///data/nlp/./x",
        "https://data.example.com/nlp/x", "file:///data/nlp/..x", "s3://data/nlp/%252e%252e/x",
    )),
    *(Case(_train(source), _FIRST) for source in (
        "s3://data/cv/x.jsonl", "s3://data/nlp2/x", "s3://data/nlp/../cv/x.jsonl", "s3://data/nlp/%2E%2e/cv/x.jsonl",
        "file:///data/nlp/../cv", "file:///data/nlp/%2e%2e/cv", "file:///data/nlp/..%2fcv", "file:///data/nlp/x/..",
        "file:///data/nlp%2f..%2fcv", "https://data.example.com/nlp/../cv", "https://data.example.com/nlp/%2e%2e/cv",
        "https://data.example.com/nlp/..%2Fcv", "https://data.example.com.evil/nlp/x", "relative/folder", "/data/cv",
    )),
    *(Case(_train(source), None, _FIRST) for source in (
        "S3://data/nlp/x", "/data/nlp/x", "file:///data//nlp/x", "https://DATA.example.com/nlp/x",
        "file://localhost/data/nlp/x",
    )),
    Case(_evaluation(data=[{"source": "s3://data/nlp/x"}])),
    Case(_evaluation(data=[{"source": "s3://data/cv/x"}]), "spec.training.evaluation.data[0].source"),
    Case(_evaluation(sets={"own": {"data": [{"source": "s3://data/nlp/x"}]}})),
    Case(_evaluation(sets={"own": {"data": [{"source": "builtin://python-stdlib"}]}})),
    Case(_evaluation(sets={"cv": {"data": [{"source": "s3://data/cv/x"}]}}), _SET),
    Case(_evaluation(sets={"cv": {"data": [{"source": "file:///data/nlp/..%2fcv"}]}}), _SET),
    Case(_model(source="hf://nlp/model")),
    Case(_model(source="hf://other/model"), "spec.training.model.source"),
    Case(_model(**{"from": {"uri": "s3://checkpoints/nlp/job"}})),
    Case(_model(**{"from": {"uri": "s3://checkpoints/cv/job"}}), "spec.training.model.from.uri"),
    Case(_distilled(source="s3://data/nlp/large")),
    Case(_distilled(source="s3://models/cv/large"), f"{_TEACHER}.source"),
    Case(_distilled(**{"from": {"uri": "s3://checkpoints/nlp/job"}})),
    Case(_distilled(**{"from": {"uri": "s3://checkpoints/cv/job"}}), f"{_TEACHER}.from.uri"),
    Case(_rewarded(source="s3://data/nlp/judge")),
    Case(_rewarded(source="s3://models/cv/judge"), f"{_SCORER}.source"),
    Case(_rewarded(**{"from": {"uri": "s3://checkpoints/nlp/job"}})),
    Case(_rewarded(**{"from": {"uri": "s3://checkpoints/cv/job"}}), f"{_SCORER}.from.uri"),
    Case({"training": {"data": {"tokenizer": "s3://data/nlp/tokenizer.json"}}}),
    Case({"training": {"data": {"tokenizer": "s3://data/cv/tokenizer.json"}}}, "spec.training.data.tokenizer"),
    Case({"training": {"data": {"chatTemplate": "s3://data/nlp/chat.jinja"}}}),
    Case({"training": {"data": {"chatTemplate": "s3://data/cv/chat.jinja"}}}, "spec.training.data.chatTemplate"),
    # What a program reads, and what it is run in: as of a training.
    Case(_program()),
    Case(_program(source="s3://data/nlp/source.tar.gz")),
    Case(_program(source="s3://data/cv/source.tar.gz"), "spec.program.source"),
    Case(_program(source="s3://data/nlp/../cv/source.tar.gz"), "spec.program.source"),
    Case(_input(source="hf://nlp/model")),
    Case(_input(source="hf://other/model"), "spec.program.inputs.base.source"),
    Case(_input(uri="s3://checkpoints/nlp/job")),
    Case(_input(uri="s3://checkpoints/cv/job"), "spec.program.inputs.base.uri"),
    Case(_program(after={"job": "base", "uri": "s3://checkpoints/nlp/job"}), only_api=True),
    Case(_program(after={"job": "base", "uri": "s3://checkpoints/cv/job"}), "spec.program.after.uri", only_api=True),
    Case(_program() | {"runtime": {"image": "registry.example.com/team/mine:7"}}),
    Case(_program() | {"runtime": {"image": "docker.io/anybody/mine:7"}}, "spec.runtime.image"),
    # Whom it may call.
    *(Case(_endpoint(value)) for value in ("https://wandb.example.com", "https://wandb.example.com/api", "no address")),
    *(Case(_endpoint(value), _ENDPOINT) for value in (
        "https://wandb.example.com.evil/", "http://wandb.example.com/", "HTTPS://evil.example.com",
        "https://wandb.example.com@evil.example.com/", "https://wandb.example.com:444/",
    )),
    Case(_endpoint("https://WANDB.example.com/api"), None, _ENDPOINT),
    Case(_endpoint("https://wandb.example.com?project=x"), None, _ENDPOINT),
)  # fmt: skip
