"""An adapter in the words of Hugging Face's `peft`: names of its tensors, adapter_config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from muster.contract.training import ALL_LINEAR, Adapter
from muster.trainer.convert import hugging_face
from muster.trainer.models.adapter import weight_of

FILE = "adapter_model.safetensors"


def names(ours: Iterable[str], of_transformers: bool) -> dict[str, str]:
    """`peft`'s name of each of our adapter's tensors, given by name. Raises UserError as `hugging_face.names`.

    of_transformers: the modules have transformers' own names already.
    """
    parts = list(ours)
    own = {weight_of(part) for part in parts}
    weights = {weight: weight for weight in own} if of_transformers else hugging_face.names(dict.fromkeys(own, "F32"))
    return {
        part: f"base_model.model.{weights[weight_of(part)].removesuffix('weight')}lora_{part.rpartition('.lora_')[2]}"
        for part in parts
    }


def config(adapter: Adapter) -> dict[str, Any]:
    """adapter_config.json of a LoraConfig."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
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
