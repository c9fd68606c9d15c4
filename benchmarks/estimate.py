"""Distance of the memory arithmetic (muster.plan.memory) from what a rank takes: real steps, measured peaks.

    python benchmarks/estimate.py [--gpu] [--only bf16] [--table] [--json FILE]

Each configuration trains a few steps in processes of its own: the trainer's own model, sharding, optimizer and step, on
packed rows. Measured is the highest resident memory of rank 0 (VmHWM, reset where the model begins), less what the same
process took after a step of a very small model: interpreter, libraries and threads are not the arithmetic's affair.
malloc is told to give every large block back at once, so that what is counted are tensors and not fragments. With
--gpu it is torch's own count (max_memory_allocated), of models of 1B and 3B parameters, as many at a time as fit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
STEPS = 2  # from the second on there are moments
AIM = 0.10
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """model: an Architecture, or a family of tests/model_families.py with its changes. documents: in each row."""

    name: str
    model: dict[str, Any]
    family: str = ""
    ranks: int = 1
    shard: str = "ddp"
    precision: str = "fp32"
    length: int = 256
    micro_batch: int = 4
    accumulation: int = 1
    recompute: str = "none"
    adapter: dict[str, Any] | None = None
    documents: int = 3
    stored: str = "F32"
    compiled: bool = False
    context: int = 1
    optimizer: dict[str, Any] = field(default_factory=dict)

    def training(self, small: bool = False) -> dict[str, Any]:
        length = 64 if small else self.length
        tokens = length * self.micro_batch * self.accumulation * self.ranks // self.context
        return {
            "model": {"source": "file:///nowhere"} if self.family or self.adapter else {"architecture": self.model},
            "adapter": self.adapter,
            "data": {"train": [{"source": "x"}], "sequenceLength": length},
            "batch": {"tokensPerStep": tokens, "microBatch": self.micro_batch},
            "precision": self.precision,
            "optimizer": self.optimizer,
            "parallel": {
                "shard": self.shard,
                "context": self.context,
                "activationCheckpointing": self.recompute,
                "compile": self.compiled and not small,
            },
            "length": {"steps": STEPS},
        }


def _decoder(dim: int, layers: int, ffn: int, vocab: int = 260, tied: bool = True, kv: int = 2) -> dict[str, Any]:
    return {
        "dim": dim,
        "layers": layers,
        "heads": dim // 64,
        "kvHeads": kv,
        "ffnDim": ffn,
        "vocabSize": vocab,
        "maxPositions": 4096,
        "tiedHead": tied,
    }


def _family(hidden: int, layers: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocab}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 2, "head_dim": 64}
    return {**sizes, **heads, "max_position_embeddings": 4096, **more}


OWN = _decoder(384, 4, 1024)
WIDE = _decoder(512, 4, 1408, kv=4)
FEW_KEYS = _decoder(512, 4, 1408, kv=2)
VOCAB = _decoder(256, 2, 704, vocab=16_000, tied=False)
QWEN = _family(384, 4, 1024, 8_000, tie_word_embeddings=True)
LLAMA = _family(384, 4, 1024, 8_000)
LORA = {"kind": "lora", "rank": 16, "targets": ["q_proj", "v_proj"]}
ALL = {"kind": "lora", "rank": 16, "targets": ["all-linear"]}
EIGHT_BITS = {"name": "adamw8bit"}
QLORA = {**ALL, "kind": "qlora"}

CASES = (
    Case("decoder", OWN),
    Case("decoder, short rows", OWN, length=64, micro_batch=2),
    Case("decoder, long rows", OWN, length=1024, micro_batch=1),
    Case("decoder, accumulating", OWN, accumulation=2),
    Case("decoder, full recompute", OWN, recompute="full"),
    Case("decoder, selective recompute", OWN, recompute="selective"),
    Case("decoder, one document", OWN, documents=1),
    Case("decoder, bf16", OWN, precision="bf16"),
    Case("decoder, bf16, full recompute", OWN, precision="bf16", recompute="full"),
    Case("decoder, ddp of 2", WIDE, ranks=2, length=128),
    Case("decoder, zero2 of 2", WIDE, ranks=2, shard="zero2", length=128),
    Case("decoder, fsdp of 2", WIDE, ranks=2, shard="fsdp", length=128),
    Case("decoder, fsdp of 2, bf16", WIDE, ranks=2, shard="fsdp", precision="bf16", length=128),
    Case("decoder, fsdp of 2, accumulating", WIDE, ranks=2, shard="fsdp", length=256, accumulation=2),
    Case("decoder, untied 16k vocabulary", VOCAB, length=128),
    Case("decoder, untied 16k vocabulary, fsdp of 2", VOCAB, ranks=2, shard="fsdp", length=128),
    Case("qwen3", QWEN, "qwen3"),
    Case("qwen3, bf16", QWEN, "qwen3", precision="bf16"),
    Case("qwen3, fsdp of 2", QWEN, "qwen3", ranks=2, shard="fsdp", length=128),
    Case("llama", LLAMA, "llama-2"),
    Case("llama, full recompute", LLAMA, "llama-2", recompute="full"),
    Case("llama, fsdp of 2, bf16", LLAMA, "llama-2", ranks=2, shard="fsdp", precision="bf16", length=128),
    Case("qwen3, LoRA of queries and values", QWEN, "qwen3", adapter=LORA),
    Case("qwen3, LoRA of all, bf16 weights", QWEN, "qwen3", adapter=ALL, precision="bf16", stored="BF16"),
    Case("llama, LoRA of all, fsdp of 2", LLAMA, "llama-2", adapter=ALL, ranks=2, shard="fsdp", length=128),
    Case("decoder, AdamW in eight bits", OWN, optimizer=EIGHT_BITS),
    Case("qwen3, fsdp of 2, eight bits", QWEN, "qwen3", ranks=2, shard="fsdp", length=128, optimizer=EIGHT_BITS),
    Case("llama, mean of the weights", LLAMA, "llama-2", optimizer={"ema": {}}),
    Case("qwen3, bf16 alone", QWEN, "qwen3", precision="bf16", optimizer={"masterWeights": False}),
    Case("qwen3, QLoRA of all", QWEN, "qwen3", adapter=QLORA),
    Case("llama, QLoRA of all, fsdp of 2", LLAMA, "llama-2", adapter=QLORA, ranks=2, shard="fsdp", length=128),
    Case("decoder, context 2", OWN, ranks=2, context=2, length=512, micro_batch=2),
    Case("decoder, context 2, one document", OWN, ranks=2, context=2, length=512, micro_batch=2, documents=1),
    Case("decoder, context 2, bf16", OWN, ranks=2, context=2, length=512, micro_batch=2, precision="bf16"),
    Case("decoder, context 2, full recompute", OWN, ranks=2, context=2, length=1024, micro_batch=1, recompute="full"),
    Case("decoder, context 4 of 4, fsdp", OWN, ranks=4, shard="fsdp", context=4, length=1024, micro_batch=1),
    Case("decoder, context 2 of 4, fsdp", WIDE, ranks=4, shard="fsdp", context=2, length=512, micro_batch=1),
    Case(
        "decoder, context 4 of 4, repeated keys", FEW_KEYS, ranks=4, shard="fsdp", context=4, length=1024, micro_batch=1
    ),
    Case("qwen3, context 2", QWEN, "qwen3", ranks=2, context=2, length=512, micro_batch=2),
    Case("qwen3, context 2, LoRA of all", QWEN, "qwen3", adapter=ALL, ranks=2, context=2, length=512, micro_batch=2),
    Case("llama, context 2, fsdp", LLAMA, "llama-2", ranks=2, shard="fsdp", context=2, length=512, micro_batch=2),
    Case("qwen3-moe", _family(256, 2, 512, 8_000, moe_intermediate_size=256, num_experts=8), "qwen3-moe", length=128),
)

# Of the size that a GPU is bought for: what a context, cuBLAS' workspaces and fragments take is little beside it.
ONE_B = {"dim": 2048, "layers": 16, "heads": 32, "kvHeads": 8, "ffnDim": 8192, "vocabSize": 128_256}
ONE_B |= {"maxPositions": 8192, "tiedHead": True}
LLAMA_3B = _family(3072, 28, 8192, 128_256, num_attention_heads=24, num_key_value_heads=8, head_dim=128)


def _on_gpu(name: str, model: dict[str, Any], family: str = "", **more: Any) -> Case:
    return Case(name, model, family, precision="bf16", length=4096, micro_batch=1, stored="BF16", **more)


GPU_CASES = (
    _on_gpu("decoder of 1B", ONE_B),
    _on_gpu("decoder of 1B, selective recompute", ONE_B, recompute="selective"),
    _on_gpu("decoder of 1B, full recompute", ONE_B, recompute="full"),
    _on_gpu("decoder of 1B, AdamW in eight bits", ONE_B, optimizer=EIGHT_BITS),
    _on_gpu("decoder of 1B, state on the host", ONE_B, optimizer={"offload": True}),
    _on_gpu("llama of 3B, LoRA of all", LLAMA_3B, "llama-2", adapter=ALL),
    _on_gpu("llama of 3B, LoRA of all, full recompute", LLAMA_3B, "llama-2", adapter=ALL, recompute="full"),
    _on_gpu("llama of 3B, QLoRA of all", LLAMA_3B, "llama-2", adapter=QLORA),
)


@dataclass
class Outcome:
    name: str
    parts: dict[str, int] = field(default_factory=dict)
    estimated: int = 0
    measured: int = 0
    process: int = 0

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the configurations for a GPU, of 64 GiB or more")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--table", action="store_true", help="print the table of docs/estimate.md too")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    cases = GPU_CASES if given.gpu else CASES
    if given.rank is not None:
        _rank(cases[given.rank])
        return 0
    chosen = [case for case in cases if given.only in case.name]
    with ThreadPoolExecutor(max_workers=_at_once() if given.gpu else 1) as pool:
        outcomes = list(pool.map(run, chosen))
    errors = [abs(outcome.error) for outcome in outcomes]
    print(
        f"{len(outcomes)} configurations: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, "
        f"{sum(error <= AIM for error in errors)} within {AIM:.0%}"
    )
    if given.table:
        print(_table(outcomes))
    if given.json:
        given.json.write_text(json.dumps([vars(outcome) | {"error": outcome.error} for outcome in outcomes], indent=2))
    return 0


def _at_once() -> int:
    import torch

    return max(1, int(torch.cuda.get_device_properties(0).total_memory) // (32 * 2**30))


def _table(outcomes: list[Outcome]) -> str:
    """As Markdown, in MiB."""
    rows = ["| configuration | estimated, MiB | measured, MiB | error |", "|---|---:|---:|---:|"]
    rows += (f"| {o.name} | {o.estimated / MIB:.0f} | {o.measured / MIB:.0f} | {o.error:+.1%} |" for o in outcomes)
    return "\n".join(rows)


def run(case: Case) -> Outcome:
    """Train the case in processes of its own, print its line. Raises where one of them fails."""
    with tempfile.TemporaryDirectory(prefix="muster-estimate-") as folder:
        _start(case, Path(folder))
        told = json.loads((Path(folder) / "outcome.json").read_text())
    outcome = Outcome(**told)
    parts = "  ".join(f"{name} {size / MIB:.0f}" for name, size in outcome.parts.items() if size)
    print(
        f"{case.name:<44} estimated {outcome.estimated / MIB:8.1f}  measured {outcome.measured / MIB:8.1f} MiB "
        f"{outcome.error:+7.1%}   ({parts})",
        flush=True,
    )
    return outcome


def _start(case: Case, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(case.ranks):
        environ = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(case.ranks),
            "LOCAL_WORLD_SIZE": str(case.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
        }
        on_gpu = case in GPU_CASES
        which = str((GPU_CASES if on_gpu else CASES).index(case))
        command = [sys.executable, __file__, "--rank", which, *(["--gpu"] if on_gpu else [])]
        ranks.append(subprocess.Popen(command, env=environ, cwd=folder))
    codes = [rank.wait(600) for rank in ranks]
    if any(codes):
        raise SystemExit(f"{case.name}: the ranks ended with {codes}")


# --- one rank ---


def _rank(case: Case) -> None:
    import torch

    from muster.trainer.config import read_ranks
    from muster.trainer.models import sharding
    from muster.trainer.parallel.groups import connect

    torch.set_num_threads(1)
    ranks = read_ranks()
    device = sharding.choose_device(ranks)
    connect(device, case.context)
    _train(case, ranks, device, small=True, steps=STEPS)
    process = _resident("VmRSS")
    _reset_peak(device)
    need = _train(case, ranks, device, small=False, steps=STEPS).need
    measured = _peak(device) - (process if device.type == "cpu" else 0)
    if ranks.rank == 0:
        parts = {name: size for name, size in need.parts.items() if name != "framework"}
        told = {"name": case.name, "parts": parts, "estimated": sum(parts.values())}
        Path("outcome.json").write_text(json.dumps({**told, "measured": measured, "process": process}))


@dataclass(frozen=True)
class Ran:
    """need: what the arithmetic says. seconds: of each step."""

    size: Any
    need: Any
    seconds: tuple[float, ...]


def train_steps(case: Case, steps: int) -> Ran:
    """In this very process, alone."""
    from muster.trainer.config import RankPosition
    from muster.trainer.models import sharding
    from muster.trainer.parallel.groups import connect

    ranks = RankPosition(rank=0, local_rank=0, world=1, local_world=1)
    device = sharding.choose_device(ranks)
    connect(device)
    _reset_peak(device)
    return _train(case, ranks, device, small=False, steps=steps)


def _train(case: Case, ranks: Any, device: Any, small: bool, steps: int) -> Ran:
    """A few steps of the trainer's own."""
    from muster.recipe.training import TrainingConfig
    from muster.trainer.config import data_parallel
    from muster.trainer.data import RankLoader
    from muster.trainer.models import sharding
    from muster.trainer.train.rank_state import RankState
    from muster.trainer.train.reduction import StepRequests
    from muster.trainer.train.step import TrainStep
    from muster.words.base import parse
    from muster.words.checkpoint import DataCursor

    training = parse(TrainingConfig, {k: v for k, v in case.training(small).items() if v is not None})
    definition = _definition(case, training.adapter, small)
    layout = sharding.plan(definition, training, ranks, 2**60, device)
    model = sharding.ParallelModel(definition, training, layout, ranks, device)
    rank_state = RankState(Path.cwd(), 1, ranks.rank, time.time())
    step = TrainStep(training, steps, model, ranks, rank_state)
    samples = training.samples_per_step()
    cursor = DataCursor(seed=0, epoch=0, sample=0)
    division = data_parallel(training, ranks)
    data = _Rows(training.data.sequence_length, case.documents)
    loader = RankLoader(data, cursor, samples, case.micro_batch, division, device)
    seconds = [
        step.run(number, loader, lambda: StepRequests(stop=False, save=False, snapshot=False)).seconds
        for number in range(1, steps + 1)
    ]
    loader.close()
    return Ran(definition.size(), layout.need, tuple(seconds))


def _definition(case: Case, adapter: Any, small: bool) -> Any:
    """The model, random; a small one warms the process up."""
    import torch

    from muster.recipe.architecture import Architecture
    from muster.trainer.models.decoder_model import DecoderModel
    from muster.trainer.models.nf4 import NF4Linear, encode
    from muster.trainer.models.self_test import examine
    from muster.trainer.models.transformers_model import TransformersModel
    from muster.trainer.parallel.shards import local
    from muster.words.base import parse

    if not case.family:
        shape = {**case.model, "layers": 1, "dim": 128, "heads": 2, "ffnDim": 64, "vocabSize": 260, "kvHeads": 2}
        return DecoderModel(parse(Architecture, shape if small else case.model), adapter)
    from tests.model_families import config_of

    tiny = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    tiny["vocab_size"] = 288
    changes = case.model | tiny if small else case.model
    config = config_of(case.family, **changes)
    model = TransformersModel(config, {}, examine(config), adapter, case.stored)
    fill = TransformersModel.fill

    class Random(TransformersModel):
        def fill(self, model: Any, device: torch.device, seed: int, values: bool) -> None:
            fill(self, model, device, seed, values)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        parameter.normal_(0.0, 0.02)
                for layer in (module for module in model.modules() if isinstance(module, NF4Linear)):
                    held = local(layer.weight_nf4)
                    rows = torch.randn(held.shape[0], layer.in_features, device=held.device).mul_(0.02)
                    for kept, made in zip((layer.weight_nf4, layer.weight_absmax), encode(rows), strict=True):
                        local(kept).copy_(made)

    return Random(**{name: getattr(model, name) for name in model.__dataclass_fields__})


class _Rows:
    """Rows of random bytes, each of some documents."""

    seed, samples_per_epoch = 0, 1 << 20

    def __init__(self, length: int, documents: int) -> None:
        import numpy

        from muster.trainer.data.packing import PackedSample

        dice = numpy.random.default_rng(0)
        tokens = dice.integers(0, 256, length + 1, dtype=numpy.int32)
        bounds = numpy.linspace(0, length, documents + 1).astype(int)
        of = numpy.repeat(numpy.arange(documents, dtype=numpy.int32), numpy.diff(bounds))
        positions = numpy.concatenate([numpy.arange(n, dtype=numpy.int32) for n in numpy.diff(bounds)])
        self._sample = PackedSample(tokens[:-1], tokens[1:].copy(), positions, of)

    def sample(self, _epoch: int, _index: int) -> Any:
        return self._sample


def _resident(what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def _reset_peak(device: Any) -> None:
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: Any) -> int:
    import torch

    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _resident("VmHWM")


if __name__ == "__main__":
    sys.exit(main())
