"""The form for the common jobs (fine-tune this model on that file; pretrain) and the document that it stands for.

Nothing is checked here: what is typed goes into the document as it is, and the dry run says what is wrong at its line.
What is not typed follows from the model and the data (muster.plan.proposal), as in `muster init`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.documents.yaml_text import write_yaml
from muster.plan.proposal import JobWishes, ProposedJob
from muster.recipe.architecture import PRESETS
from muster.words.names import JOB_NAME

FINE_TUNE, PRETRAIN = "fine-tune", "pretrain"
METHODS = (("", "By model size"), ("lora", "LoRA adapter"), ("whole", "All weights"), ("qlora", "QLoRA (4 bits)"))
MODELS = tuple(PRESETS)
# Every field of the form, with what it holds before anybody has typed.
FIELDS = {
    "kind": FINE_TUNE,
    "name": "",
    "project": "",
    "model": "",
    "step": "best",
    "method": "",
    "preset": "muster-60m",
    "tokenizer": "bytes",
    "data": "",
    "epochs": "3",
    "steps": "1000",
    "sequence": "",
    "lr": "",
    "nodes": "1",
    "gpus": "0",
}


def read_fields(form: Mapping[str, list[str]]) -> dict[str, str]:
    """The form's own fields of all that was sent; one that was not sent has its first value."""
    return {name: form.get(name, [first])[0].strip() for name, first in FIELDS.items()}


def is_filled_in(fields: Mapping[str, str]) -> bool:
    """Return whether somebody has begun to fill in the form."""
    return any(fields[name] for name in ("name", "model", "data"))


def written(proposed: ProposedJob) -> str:
    """The document as YAML, with the reason of each setting."""
    return write_yaml(proposed.document, proposed.comments)


def wishes_of(fields: Mapping[str, str]) -> JobWishes:
    """Return what the fields ask for."""
    tunes = fields["kind"] != PRETRAIN
    return JobWishes(
        name=fields["name"],
        model=_tuned(fields) if tunes else {"preset": fields["preset"]},
        data=fields["data"],
        task="" if tunes else "pretrain",
        method=fields["method"] if tunes else "",
        tokenizer="" if tunes else fields["tokenizer"],
        sequence_length=_number(fields["sequence"]) if fields["sequence"] else None,
        epochs=_number(fields["epochs"]) if tunes else None,
        steps=None if tunes else _number(fields["steps"]),
        lr=_number(fields["lr"]) if fields["lr"] else None,
        nodes=_number(fields["nodes"]),
        gpus=_number(fields["gpus"]),
        project=fields["project"],
    )


def _tuned(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the model, which is a job by its name or else a folder by its address."""
    model = fields["model"]
    if JOB_NAME.fullmatch(model) is None:
        return {"source": model}
    return {"from": {"job": model, "step": _number(fields["step"]) or "best"}}


def _number(text: str | float) -> Any:
    """The number that the text is, or else the text, whose error is shown at its field."""
    for kind in (int, float):
        try:
            return kind(text) if isinstance(text, str) else text
        except ValueError:
            continue
    return text
