"""What loading takes: a model of 2 GB on two ranks, from a folder and from S3, against each rank's shard of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.trainer.gangs import training, write_corpus
from tests.model_families import edit_json, write_model
from tests.ports import free_port
from tests.s3_servers import BUCKET, rclone_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def write_large_model(folder: Path) -> int:
    """2 GB in bf16, a file for each tensor's layer; the bytes of its weights."""
    write_model(folder, "llama-3.1", torch.bfloat16, hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=288)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    width, inner, layers, vocabulary = 2048, 8192, 14, 32_000
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    edit_json(folder / "config.json", head_dim=128, num_attention_heads=16, num_key_value_heads=16, **sizes)
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
    shapes |= {"mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width)}
    shapes |= {"mlp.down_proj.weight": (width, inner)}
    shapes |= {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
    groups = {f"layer-{n}": {f"model.layers.{n}.{name}": s for name, s in shapes.items()} for n in range(layers)}
    groups["rest"] = {
        "model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width),
        "model.norm.weight": (width,),
    }  # fmt: skip
    index = {name: f"{file}.safetensors" for file, group in groups.items() for name in group}
    total = 0
    for file, group in groups.items():
        tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in group.items()}
        total += sum(tensor.numel() * 2 for tensor in tensors.values())
        save_file(tensors, folder / f"{file}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total


LOADER = """
import json, os, re, sys
from pathlib import Path
import torch
from muster.contract.base import parse
from muster.contract.training import TrainingConfig
from muster.trainer.config import Ranks
from muster.trainer.models import sharding, transformers_model
from muster.trainer.models.files import open_files
from muster.storage.model_folder import open_folder

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

config = parse(TrainingConfig, json.loads(sys.argv[1]), "training")
ranks = Ranks(int(os.environ["RANK"]), int(os.environ["RANK"]), 2, 2)
device = torch.device("cpu")
sharding.connect(device)
definition = transformers_model.from_folder(open_folder(open_files(config.model.source)), config.adapter)
layout = sharding.plan(definition, config, ranks, 1 << 40)
before = {}

class Watched(type(definition)):
    def fill(self, *args, **kwargs):
        Path("/proc/self/clear_refs").write_text("5")
        before["bytes"] = peak()
        super().fill(*args, **kwargs)

object.__setattr__(definition, "__class__", Watched)
model = sharding.ParallelModel(definition, config, layout, ranks, device)
share = sum(p.to_local().numel() * p.element_size() for p in model.module.parameters())
print(json.dumps({"before": before["bytes"], "peak": peak(), "share": share}))
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_loading_two_gigabytes_takes_the_shard_and_a_tenth(tmp_path: Path, kind: str) -> None:
    """From where the filling begins: what the process takes before it is the libraries'."""
    folder = tmp_path / BUCKET / "large"
    total = write_large_model(folder)
    assert total > 2 * 10**9
    config = training(
        write_corpus(tmp_path / "corpus"),
        model={"source": folder.as_uri() if kind == "file" else f"s3://{BUCKET}/large"},
        adapter={"rank": 1, "targets": ["q_proj"]},
        parallel={"shard": "fsdp"},
    )
    with rclone_server(tmp_path) as server:
        port = str(free_port())
        meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", LOADER, json.dumps(config)],
                env={**os.environ, **server.environment(), **meeting, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for one in said:
        assert total / 2 <= one["share"] <= 0.51 * total
        assert one["peak"] - one["before"] <= 1.1 * one["share"], said
