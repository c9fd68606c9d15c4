"""An adapter in the words of Hugging Face's `peft`: names of its tensors, adapter_config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from muster.contract.training import Adapter
from muster.trainer.convert import hugging_face
from muster.trainer.models.adapter import weight_of

FILE = "adapter_model.safetensors"


def names(ours: Iterable[str]) -> dict[str, str]:
    """`peft`'s name of each of our adapter's tensors, given by name. Raises UserError as `hugging_face.names`."""
    parts = list(ours)
    weights = hugging_face.names({weight_of(part): "F32" for part in parts})
    return {
        part: f"base_model.model.{weights[weight_of(part)].removesuffix('.weight')}.{part.rsplit('.', 2)[1]}.weight"
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
        "target_modules": list(adapter.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
