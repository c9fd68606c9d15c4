"""An adapter in the words of Hugging Face's `peft`: names of its tensors, adapter_config.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from muster.contract.adapter_config import ALL_LINEAR, Adapter
from muster.contract.address import hub_path, parse_address
from muster.contract.checkpoint import Commit
from muster.trainer.convert import hugging_face
from muster.trainer.models.adapter import weight_of

FILE = "adapter_model.safetensors"


def names(ours: Iterable[str], of_transformers: bool) -> dict[str, str]:
    """`peft`'s name of each of our adapter's tensors, given by name.

    `of_transformers` tells that the modules have transformers' own names already. Raises UserError as
    `hugging_face.names` does.
    """
    parts = list(ours)
    own = {weight_of(part) for part in parts}
    weights = {weight: weight for weight in own} if of_transformers else hugging_face.names(dict.fromkeys(own, "F32"))
    return {
        part: f"base_model.model.{weights[weight_of(part)].removesuffix('weight')}lora_{part.rpartition('.lora_')[2]}"
        for part in parts
    }


@dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to, as `from_pretrained` takes it: a folder, or a repository of the hub with
    its revision."""

    name: str
    revision: str | None = None


def base_of(commit: Commit) -> Base | None:
    """The folder or repository that the job began from; None where it began from a commit, or from an address that
    `from_pretrained` does not read."""
    if not commit.config["model"].get("source"):
        return None
    origin = commit.architecture["source"]
    address = parse_address(origin["address"])
    if address.scheme == "hf":
        return Base(hub_path(address).repository, origin["revision"])
    return Base(str(address.local.absolute())) if address.scheme == "file" else None


def config(adapter: Adapter, base: Base) -> dict[str, Any]:
    """What the adapter_config.json of a LoraConfig holds."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": ALL_LINEAR if ALL_LINEAR in adapter.targets else list(adapter.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": adapter.kind == "rslora",
        "use_dora": adapter.kind == "dora",
        "modules_to_save": None,
        "inference_mode": True,
    }
