"""Tiny models of the families that people train, written as Hugging Face writes them. Made by the test, random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

BASE: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ROPE_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# By name: the model_type, and what differs from BASE.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1": ("llama", {"head_dim": 8, "rope_parameters": _ROPE_3_1}),
    "llama-2": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma-2": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "gemma-3": ("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWS}),
    "phi-3": ("phi3", {"sliding_window": 8}),
    "olmo-2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOWS}),
    "granite": (
        "granite",
        {"embedding_multiplier": 12, "logits_scaling": 8, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    ),
}


def config_of(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    kind, own = FAMILIES[family]
    return AutoConfig.for_model(kind, **{**BASE, **own, **changes})


def write_model(folder: Path, family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family in `folder`, as save_pretrained writes it; returned too."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0.0, 0.1)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="40KB")
    write_tokenizer(folder)
    return model.eval()


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, and ChatML's marks, in the form that AutoTokenizer reads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "clean_up": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}\n")
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}{{ messages[0].content }}\n")


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
