"""The form for the common jobs (fine-tune this model on that file; pretrain) and the document that it stands for. Pure.

Nothing is checked here: what is typed goes into the document as it is, and the dry run says what is wrong at its line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from muster.contract.architecture import PRESETS
from muster.contract.names import DEFAULT_PROJECT, JOB_NAME, KIND, Label
from muster.contract.replies import API_VERSION
from muster.documents.yaml_text import write_yaml

FINE_TUNE, PRETRAIN = "fine-tune", "pretrain"
METHODS = (("lora", "LoRA: small matrices beside the weights"), ("whole", "All weights"), ("qlora", "QLoRA: in 4 bits"))
MODELS = tuple(PRESETS)
# Every field of the form, with what it holds before anybody has typed.
FIELDS = {
    "kind": FINE_TUNE,
    "name": "",
    "project": "",
    "model": "",
    "step": "best",
    "method": "lora",
    "preset": "muster-60m",
    "tokenizer": "bytes",
    "data": "",
    "epochs": "3",
    "steps": "1000",
    "sequence": "1024",
    "lr": "",
    "nodes": "1",
    "gpus": "0",
}
# Usual ones: an adapter's matrices begin at nothing and bear ten times what the weights of a trained model do.
_LEARNING_RATES = {"lora": 2e-4, "qlora": 2e-4, "whole": 1e-5, PRETRAIN: 3e-4}
_SAMPLES = 16  # of a step, at least, where the form does not ask: enough to learn smoothly, and little memory


def read_fields(form: Mapping[str, list[str]]) -> dict[str, str]:
    """The form's own fields of all that was sent; one that was not sent has its first value."""
    return {name: form.get(name, [first])[0].strip() for name, first in FIELDS.items()}


def is_filled_in(fields: Mapping[str, str]) -> bool:
    """Return whether somebody has begun to fill in the form."""
    return any(fields[name] for name in ("name", "model", "data"))


def written(fields: Mapping[str, str]) -> str:
    """The document as YAML."""
    return write_yaml(_document(fields))


def _document(fields: Mapping[str, str]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": fields["name"]}
    if fields["project"] and fields["project"] != DEFAULT_PROJECT:
        metadata["labels"] = {str(Label.PROJECT): fields["project"]}
    tunes = fields["kind"] != PRETRAIN
    training: dict[str, Any] = {"task": "sft" if tunes else "pretrain"}
    training |= _tuned(fields) if tunes else {"model": {"preset": fields["preset"]}}
    sequence, gpus = _number(fields["sequence"]), _number(fields["gpus"])
    data: dict[str, Any] = {"train": [{"source": fields["data"]}], "sequenceLength": sequence}
    if not tunes:
        data["tokenizer"] = fields["tokenizer"]
    rate = fields["lr"] or _LEARNING_RATES.get(fields["method"] if tunes else PRETRAIN, 1e-4)
    training |= {
        "data": data,
        "optimizer": {"lr": _number(rate), "schedule": {"name": "cosine", "warmupSteps": 10}},
        "batch": {"tokensPerStep": _tokens_per_step(fields), "microBatch": 1},
        "precision": "bf16" if gpus else "fp32",
        "length": {"epochs": _number(fields["epochs"])} if tunes else {"steps": _number(fields["steps"])},
        "evaluation": {"every": 50, "holdout": 0.05},
        "seed": 17,
    }
    gang = {"nodes": _number(fields["nodes"]), "gpusPerNode": gpus}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {"training": training, "gang": gang}}


def _tuned(fields: Mapping[str, str]) -> dict[str, Any]:
    """The model, which is a job by its name or else a folder by its address, and how it learns."""
    model = fields["model"]
    named = JOB_NAME.fullmatch(model) is not None
    settings: dict[str, Any] = {
        "model": {"from": {"job": model, "step": _number(fields["step"]) or "best"}} if named else {"source": model}
    }
    if fields["method"] != "whole":
        settings["adapter"] = {"kind": fields["method"], "rank": 16, "alpha": 32, "targets": ["all-linear"]}
    return settings


def _tokens_per_step(fields: Mapping[str, str]) -> Any:
    """Return a number of tokens that gives every rank equally many samples."""
    sequence, nodes, gpus = (_number(fields[name]) for name in ("sequence", "nodes", "gpus"))
    if not all(isinstance(each, int) and each >= 0 for each in (sequence, nodes, gpus)) or not nodes:
        return sequence
    ranks = nodes * max(1, gpus)
    return sequence * ranks * math.ceil(_SAMPLES / ranks)


def _number(text: str | float) -> Any:
    """The number that the text is, or else the text, whose error is shown at its field."""
    for kind in (int, float):
        try:
            return kind(text) if isinstance(text, str) else text
        except ValueError:
            continue
    return text
