"""Muster's own decoder beside the class of transformers of the same shape: a step, a start, memory.

    python benchmarks/decoder.py [--preset muster-4m] [--shards ddp,fsdp] [--ranks 1,2] [--rounds 8] [--steps 2]

Steps: both models are in the same processes and take turns in blocks, so that whatever else the machine does falls on
both; the ratios are medians over neighbouring blocks, by wall-clock and by CPU time. Starts: a process of its own for
each model, in turns, from its first instruction to the end of its first step; its memory is its peak.
Each step is a forward pass with the loss, a backward pass and fused AdamW, in fp32 on random tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

OWN, GENERAL = "own", "general"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="muster-4m")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument(
        "--shards", type=lambda text: text.split(",") if text else [], default=["ddp", "fsdp"], metavar="SHARD,…"
    )
    parser.add_argument(
        "--ranks", type=lambda text: [int(n) for n in text.split(",") if n], default=[1, 2], metavar="N,…"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a block")
    parser.add_argument("--starts", type=int, default=3, help="starts of each model")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(be_rank(given.rank)))
        return 0
    for ranks in given.ranks:
        for shard in given.shards:
            order = {"preset": given.preset, "length": given.length, "shard": shard, "steps": given.steps}
            blocks = gang(order | {"sides": [OWN, GENERAL], "rounds": given.rounds}, ranks)["blocks"]
            ratios = [compare(blocks, clock) for clock in (0, 1)]
            print(f"{shard} {ranks} rank(s): time of a step, own / general: {ratios[0]}; by CPU time {ratios[1]}")
    starts: dict[str, list[dict[str, float]]] = {OWN: [], GENERAL: []}
    for turn in range(given.starts):
        for side in (OWN, GENERAL) if turn % 2 else (GENERAL, OWN):
            order = {"preset": given.preset, "length": given.length, "shard": "ddp", "steps": 1}
            starts[side].append(gang(order | {"sides": [side], "rounds": 0}, 1)["start"])
    if not given.starts:
        return 0
    for what, unit in (("wall", "s"), ("cpu", "s of CPU"), ("libraries", "MiB before the model"), ("peak", "MiB peak")):
        both = ", ".join(f"{side} {statistics.median(s[what] for s in starts[side]):.1f}" for side in starts)
        print(f"start to the end of the first step, {unit}: {both}")
    return 0


def compare(blocks: dict[str, list[list[float]]], clock: int) -> str:
    """Return the median of the ratios of neighbouring blocks, the first of which warms up, with their quartiles."""
    ratios = [mine[clock] / theirs[clock] for mine, theirs in zip(blocks[OWN], blocks[GENERAL], strict=True)][1:]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def gang(order: dict[str, Any], ranks: int) -> Any:
    """Run the ranks, and return what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "MUSTER_DEVICE": "cpu"}
        command = [sys.executable, __file__, "--rank", json.dumps(order)]
        whole = {**os.environ, **{name: str(value) for name, value in environ.items()}}
        processes.append(subprocess.Popen(command, env=whole, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank of {order} failed; run it alone to see why")
    return json.loads(outputs[0].splitlines()[-1])


# --- a rank ---


def be_rank(order: dict[str, Any]) -> dict[str, Any]:
    """Time blocks of steps in turns; with a single side and no rounds, the start alone."""
    began = time.perf_counter()
    makers = {OWN: own_definition, GENERAL: general_definition}
    definitions = {side: makers[side](order["preset"]) for side in order["sides"]}
    libraries = _status("VmRSS")
    steps = {side: stepper(definition, order) for side, definition in definitions.items()}
    if not order["rounds"]:
        steps[order["sides"][0]]()
        passed = time.perf_counter() - began
        start = {"wall": passed, "cpu": time.process_time(), "libraries": libraries, "peak": _status("VmHWM")}
        return {"start": start}
    blocks: dict[str, list[tuple[float, float]]] = {side: [] for side in steps}
    for turn in range(order["rounds"] + 1):
        for side in order["sides"] if turn % 2 else reversed(order["sides"]):
            steps[side]()  # pays for the caches that the other one emptied
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(order["steps"]):
                steps[side]()
            blocks[side].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {"blocks": blocks}


def _status(what: str) -> float:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{what}:"))


def own_definition(preset: str) -> Any:
    from muster.recipe.architecture import PRESETS
    from muster.trainer.models.decoder_model import DecoderModel

    return DecoderModel(PRESETS[preset])


def general_definition(preset: str) -> Any:
    from transformers import LlamaConfig

    from muster.recipe.architecture import PRESETS
    from muster.trainer.models.self_test import examine
    from muster.trainer.models.transformers_model import TransformersModel

    shape = PRESETS[preset]
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tied_head,
    )
    return TransformersModel(config, {}, examine(config))


def stepper(definition: Any, order: dict[str, Any]) -> Callable[[], None]:
    """Return the step of a model that is laid out as a job's."""
    import torch

    from muster.recipe.training import TrainingConfig
    from muster.trainer.config import read_ranks
    from muster.trainer.models import sharding
    from muster.trainer.parallel.groups import connect
    from muster.words.base import parse

    ranks, device, length = read_ranks(), torch.device("cpu"), order["length"]
    connect(device)
    document = {
        "model": {"preset": order["preset"]},
        "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": length},
        "batch": {"tokensPerStep": length * ranks.world, "microBatch": 1},
        "parallel": {"shard": order["shard"]},
        "length": {"steps": 1},
        "precision": "fp32",
    }
    training = parse(TrainingConfig, document)
    layout = sharding.plan(definition, training, ranks, sharding.capacity(device, ranks), device)
    model = sharding.ParallelModel(definition, training, layout, ranks, device)
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.module.parameters():
            parameter.normal_(0.0, 0.02)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 256, (1, length))
    documents = torch.arange(length)[None] // (length // 2)  # two packed documents
    positions = torch.arange(length)[None] % (length // 2)

    def step() -> None:
        optimizer.zero_grad()
        with model.micro_step(last=True):
            loss = model.model(tokens, positions, documents, torch.roll(tokens, -1, 1)) / length
            loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    sys.exit(main())
