"""An adapter in the words of Hugging Face's `peft`: names of its tensors, adapter_config.json."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from muster.plan.model_size import is_embedding, is_head, saved_weights
from muster.recipe.adapter_config import ALL_LINEAR, Adapter
from muster.trainer.convert import hugging_face
from muster.trainer.convert.transformers_names import TensorConversion
from muster.trainer.models.adapter import is_part, weight_of
from muster.words.address import hub_path, parse_address
from muster.words.checkpoint import Commit, TensorEntry

FILE = "adapter_model.safetensors"


def tensors_of(weights: Collection[str], adapter: Adapter) -> list[str]:
    """Return those of a commit's weights that an adapter's file holds: its matrices, and the weights that were trained
    whole."""
    parts = [name for name in weights if is_part(name)]
    own = [name for name in weights if not is_part(name)]
    return parts + saved_weights(own, adapter, has_tied_head(own))


def has_tied_head(weights: Iterable[str]) -> bool:
    """Return whether none of a model's weights is a head's own, so that its head is the embedding."""
    return not any(is_head(name) for name in weights)


def names(ours: Iterable[str], of_transformers: bool, in_order: Iterable[str] = ()) -> dict[str, str]:
    """`peft`'s name of each tensor of an adapter's file, given by our name.

    `of_transformers` tells that the modules have transformers' own names already. `in_order` are the model's weights in
    its modules' order, where several of one module have an adapter: `peft` wraps the module once for each, so that the
    first is within the second. Raises UserError as `hugging_face.names` does.
    """
    all_names = list(ours)
    own = {weight_of(name) if is_part(name) else name for name in all_names}
    weights = {weight: weight for weight in own} if of_transformers else hugging_face.names(dict.fromkeys(own, "F32"))

    around: dict[str, int] = {}  # of each weight, the wrappers around its own
    for module, together in groupby((w for w in in_order if w in own), key=lambda weight: weight.rpartition(".")[0]):
        around |= {weight: number for number, weight in enumerate(reversed([*together])) if module}

    def theirs(name: str) -> str:
        if not is_part(name):
            return weights[name]
        weight = weight_of(name)
        module, part = weights[weight].rpartition(".")[0], name.rpartition(".lora_")[2].partition(".")[0]
        within = ".base_layer" * around.get(weight, 0)
        return f"{module}{within}.lora_{part}" + ("" if part == "magnitude_vector" else ".weight")

    return {name: f"base_model.model.{theirs(name)}" for name in all_names}


def tied(ours: str, theirs: str, entry: TensorEntry, head: str) -> TensorConversion:
    """An embedding that was trained whole and is the head too: `peft` reads it under both names."""
    both = theirs, f"base_model.model.{head}"
    return TensorConversion(
        (ours,), dict.fromkeys(both, tuple(entry.shape)), lambda values: dict.fromkeys(both, values[ours])
    )


@dataclass(frozen=True)
class BaseModelName:
    """The model that an adapter belongs to, as `from_pretrained` takes it: a folder, or a repository of the hub with
    its revision."""

    name: str
    revision: str | None = None


def base_of(commit: Commit) -> BaseModelName | None:
    """The folder or repository that the job began from; None where it began from a commit, has other tokens than the
    folder, or began from an address that `from_pretrained` does not read."""
    if not commit.config["model"].get("source") or commit.config.get("data", {}).get("addTokens"):
        return None
    origin = commit.architecture["source"]
    address = parse_address(origin["address"])
    if address.scheme == "hf":
        return BaseModelName(hub_path(address).repository, origin["revision"])
    return BaseModelName(str(address.local.absolute())) if address.scheme == "file" else None


def config(
    adapter: Adapter, base: BaseModelName, tensors: Iterable[str] = (), tied_head: bool = False, scores: bool = False
) -> dict[str, Any]:
    """Return the adapter_config.json of a LoraConfig.

    `tensors` are the names of the tensors in the adapter's file, as `names` gives them. `tied_head` says that embedding
    and head are one weight, and `scores` that the head scores texts.
    """
    whole = [name.removeprefix("base_model.model.") for name in tensors if ".lora_" not in name]
    saved = sorted({name.rpartition(".")[0] for name in whole})
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": ALL_LINEAR if ALL_LINEAR in adapter.targets else list(adapter.targets),
        "target_parameters": list(adapter.target_parameters) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": adapter.kind == "rslora",
        "use_dora": adapter.kind == "dora",
        "modules_to_save": saved or None,
        "ensure_weight_tying": tied_head and any(is_embedding(name) for name in whole),
        "inference_mode": True,
    }
