"""Figures that only a GPU can give: tokens per second and MFU of real shapes, seconds blocked by commits, NVML.

On a CPU the same functions run shapes of a toy's size: what they say there means nothing, but that they run.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.checks import NotHere

GIB = 2**30
WARM_UP, STEPS = 3, 5
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class SpeedCase:
    """preset: of our own decoder; None: Llama 8B by transformers with random weights, beside an adapter of `kind`.
    needs: bytes of the device's memory."""

    name: str
    preset: str | None
    kind: str = ""
    micro_batch: int = 1
    accumulation: int = 1
    recompute: str = "none"
    published: str = ""
    needs: int = 0


AIM = "aim 42 % MFU"
NEMO = "aim 11,200 tokens/s; NeMo AutoModel on an H100: 12,473"
SPEEDS = (
    SpeedCase("pretraining llama-1b at 4k", "llama-1b", micro_batch=4, accumulation=2, published=AIM, needs=75 * GIB),
    SpeedCase("8B LoRA at 4k", None, "lora", micro_batch=1, published=NEMO, needs=75 * GIB),
    SpeedCase("pretraining llama-3b at 4k", "llama-3b", accumulation=4, published=AIM, needs=75 * GIB),
    SpeedCase("8B QLoRA at 4k", None, "qlora", published="", needs=75 * GIB),
)


TOY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 260,
    "max_position_embeddings": 512,
}


def speed_of(name: str, device: str = "cuda") -> str:
    """Tokens per second, MFU and peak memory of a few real steps, beside what the arithmetic says of the memory."""
    from benchmarks.estimate import Case, train_steps

    from muster.plan import flops
    from muster.recipe.adapter_config import Adapter
    from muster.recipe.architecture import PRESETS
    from muster.words.base import InvalidDocument, dump, parse

    case = next(each for each in SPEEDS if each.name == name)
    adapter = None
    if case.kind:
        adapter = {"kind": case.kind, "rank": 16, "targets": ["q_proj", "v_proj"]}
        try:
            parse(Adapter, adapter)
        except InvalidDocument:
            raise NotHere(f"this Muster has no {case.kind}") from None
    toy = device == "cpu"
    preset = "muster-1m" if toy else case.preset
    length = 128 if toy else 4096
    plain = Case(
        name,
        dump(PRESETS[preset]) if case.preset else TOY if toy else LLAMA_8B,
        "" if case.preset else "llama-2",
        precision="bf16",
        length=length,
        micro_batch=case.micro_batch,
        accumulation=case.accumulation,
        recompute=case.recompute,
        adapter=adapter,
        documents=4,
        stored="BF16",
        # One toy shows that compiling runs; that layers with adapters are compiled, test_models_compiled.py does.
        compiled=not toy or case is SPEEDS[0],
    )
    ran = train_steps(plain, WARM_UP + STEPS)
    seconds = statistics.median(ran.seconds[WARM_UP:])
    speed = length * case.micro_batch * case.accumulation / seconds
    if toy:
        return f"{speed:,.0f} tokens/s of a toy"
    peak = flops.peak(torch.cuda.get_device_name(), "bf16")
    mfu = flops.utilisation(flops.per_token(ran.size, length), speed, peak, 1)
    share = "MFU unknown" if mfu is None else f"{mfu:.1%} MFU"
    estimated = ran.need.total - ran.need.framework
    measured = torch.cuda.max_memory_allocated()
    return (
        f"{speed:,.0f} tokens/s, {share}, {measured / GIB:.1f} GiB at the peak "
        f"(estimated {estimated / GIB:.1f}, {estimated / measured - 1:+.1%})"
    )


def blocked_by_commits(device: str = "cuda") -> str:
    """A whole run of the trainer with one commit halfway, to a folder: how long training stood still for it, and what a
    step took before it and beside its upload. The last step is committed too, after that upload."""
    from tests.integration.trainer.gangs import Job, Part, train_many, training, write_corpus

    steps, halfway = 39, 20
    with tempfile.TemporaryDirectory(prefix="muster-rehearsal-") as folder:
        root = Path(folder)
        source = write_corpus(root / "corpus", documents=2000)
        preset, length = ("muster-1m", 64) if device == "cpu" else ("llama-1b", 1024)
        document = training(
            source,
            model={"preset": preset},
            data={"train": [{"source": source}], "sequenceLength": length},
            batch={"tokensPerStep": 16 * length, "microBatch": 16},
            precision="bf16",
            length={"steps": steps},
        )
        job = Job(root / "job", document, {"every": halfway, "keep": {"last": 1}}, device=device)
        assert train_many(root, 1, [Part(job)]) == [0]
        size = sum(file.stat().st_size for file in job.folder.rglob("*") if file.is_file())
        at = [record.at for record in job.steps(1)]
    between = [later - earlier for earlier, later in itertools.pairwise(at)]
    # The copy of the weights may lengthen the step that makes it or those beside it.
    around, after = slice(halfway - 2, halfway + 2), between[halfway + 2 :]
    before = statistics.median(between[WARM_UP : around.start])
    blocked, beside = sum(each - before for each in between[around]), statistics.median(after)
    speeds = f"steps of {before:.3f} s before it, {beside:.3f} s beside its upload"
    return f"{blocked:.3f} s for {size / 1e9:.1f} GB; {speeds}"


def agent_sees() -> str:
    """The node agent's reading of every GPU, against what torch says is there."""
    from muster.agent.gpus import GpuSource

    gpus = GpuSource()
    gpus.look()
    gpus.look()  # some counters are differences between two looks
    assert len(gpus.readings) >= torch.cuda.device_count(), "NVML tells of fewer GPUs than torch"
    values: dict[Any, float] = gpus.readings[0].values
    assert values, "NVML told nothing of the first GPU"
    return f"{len(gpus.readings)} GPUs, {len(values)} values of the first"
