"""A large model's folder, and one rank of two that loads its shard of it, in a process of its own.

    RANK=0 WORLD_SIZE=2 … python -m tests.loading_rank TRAINING

TRAINING is `spec.training` as JSON. Prints {"before", "peak", "share", "seconds", "cpu"} as JSON: the memory where the
filling begins, the most from there on, the bytes of the rank's weights, and the seconds that filling them took, by the
clock and of the CPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.model_families import edit_json, write_model
from tests.ports import free_port

WIDTH, INNER, VOCABULARY = 2048, 8192, 32_000


def write_large_model(folder: Path, layers: int = 14) -> int:
    """A Llama in bf16, a file for each layer and one for the rest; the bytes of its weights, 2 GB with 14 layers."""
    write_model(folder, "llama-3.1", torch.bfloat16, hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=288)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    edit_json(folder / "config.json", head_dim=128, num_attention_heads=16, num_key_value_heads=16, **sizes)
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
    shapes |= {"mlp.gate_proj.weight": (INNER, WIDTH), "mlp.up_proj.weight": (INNER, WIDTH)}
    shapes |= {"mlp.down_proj.weight": (WIDTH, INNER)}
    shapes |= {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}
    groups = {f"layer-{n}": {f"model.layers.{n}.{name}": s for name, s in shapes.items()} for n in range(layers)}
    tables = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    groups["rest"] = {**tables, "model.norm.weight": (WIDTH,)}
    index = {name: f"{file}.safetensors" for file, group in groups.items() for name in group}
    total = 0
    for file, group in groups.items():
        tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in group.items()}
        total += sum(tensor.numel() * 2 for tensor in tensors.values())
        save_file(tensors, folder / f"{file}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total


def load_on_two_ranks(training: Mapping[str, Any], environment: Mapping[str, str]) -> list[dict[str, float]]:
    """What each of the two ranks says."""
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // 2))  # as the launcher shares cores
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.loading_rank", json.dumps(training)],
            env={**os.environ, **environment, **meeting, "RANK": str(rank)},
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    import torch.distributed as dist

    from muster.recipe.training import TrainingConfig
    from muster.storage.model_folder import open_folder
    from muster.trainer.config import RankPosition
    from muster.trainer.models import sharding, transformers_model
    from muster.trainer.models.files import open_files
    from muster.trainer.parallel.groups import connect
    from muster.words.base import parse

    config = parse(TrainingConfig, json.loads(sys.argv[1]), "training")
    assert config.model.source is not None
    ranks = RankPosition(int(os.environ["RANK"]), int(os.environ["RANK"]), 2, 2)
    device = torch.device("cpu")
    connect(device)
    definition = transformers_model.from_folder(open_folder(open_files(config.model.source)), config.adapter)
    layout = sharding.plan(definition, config, ranks, 1 << 40)
    noted = {}

    class Watched(type(definition)):  # type: ignore[misc]
        def fill(self, *args: Any, **kwargs: Any) -> None:
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")
            noted["before"], began, spent = peak_bytes(), time.perf_counter(), time.process_time()
            super().fill(*args, **kwargs)
            noted["seconds"], noted["cpu"] = time.perf_counter() - began, time.process_time() - spent

    object.__setattr__(definition, "__class__", Watched)
    model = sharding.ParallelModel(definition, config, layout, ranks, device)
    share = sum(p.to_local().numel() * p.element_size() for p in model.module.parameters())  # type: ignore[attr-defined]
    print(json.dumps({**noted, "peak": peak_bytes(), "share": share}))
    dist.destroy_process_group()


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
