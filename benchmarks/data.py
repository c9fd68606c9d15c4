"""Data: how fast the corpus is prepared and how fast batches come, against plain memmap crops and HF datasets.

    python benchmarks/data.py [--seconds 2] [--json]

The other side of `batches` is what nanoGPT's get_batch does: random crops of a token file, no document boundaries, no
positions, no epochs, no resumption. It is the floor of what any loader has to do. Ratios are theirs / ours: above 1,
Muster is slower. `wait` is the share of a step that training waits for data when a step takes as long as given.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muster.contract.base import parse
from muster.contract.checkpoint import DataCursor
from muster.contract.data_config import Source
from muster.contract.training import TrainingConfig
from muster.storage.sources import STDLIB, find
from muster.trainer.config import DataParallel
from muster.trainer.data import Dataset, Loader, Tokenizer, load_tokenizer, open_data
from muster.trainer.data.packing import best_fit
from muster.trainer.data.prepare import prepared

SHAPE = {"dim": 128, "layers": 1, "heads": 4, "kvHeads": 4, "ffnDim": 128, "vocabSize": 260}
BATCHES = ((512, 8), (2048, 8), (8192, 2))  # (tokens per sample, samples per step)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=2.0, help="time per measurement")
    options.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "prepare": preparing(Path(folder)),
            "batches": [batches(Path(folder), length, count, given.seconds) for length, count in BATCHES],
            "packing": packing(),
        }
    print(json.dumps(results) if given.json else lines(results))


def preparing(folder: Path) -> list[dict[str, Any]]:
    """The standard library, as bytes and by a BPE tokenizer of 8,000 tokens that is trained on a part of it here."""
    results = []
    for name, tokenizer in (("bytes", load_tokenizer("bytes")), ("BPE 8k", bpe(folder))):
        began = time.perf_counter()
        store = prepared(Source(source=STDLIB), tokenizer, folder / "cache", lambda line: None)
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        prepared(Source(source=STDLIB), tokenizer, folder / "cache", lambda line: None)
        results.append(
            {
                "tokenizer": name,
                "tokens": store.meta.tokens,
                "seconds": seconds,
                "tokens_per_second": store.meta.tokens / seconds,
                "megabytes_per_second": store.meta.bytes_read / seconds / 1e6,
                "seconds_when_prepared": time.perf_counter() - began,
            }
        )
    return results


def bpe(folder: Path) -> Tokenizer:
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8_000, special_tokens=["<|endoftext|>"], show_progress=False)
    made.train([file.address for file in find(STDLIB, "text")[:60]], trainer)
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder / "tokenizer.json"))


def batches(folder: Path, length: int, samples: int, seconds: float) -> dict[str, Any]:
    dataset = open_data(configuration(length), load_tokenizer("bytes"), folder / "cache", lambda line: None).train
    ours = step_seconds(loader_steps(dataset, samples, prefetch=0), seconds)
    crops = step_seconds(crop_steps(folder, length, samples), seconds)
    result = {
        "length": length,
        "samples": samples,
        "muster_tokens_per_second": samples * length / ours,
        "crops_tokens_per_second": samples * length / crops,
        "ratio_to_crops": ours / crops,
        "wait_at_10_ms": waiting(dataset, samples, 0.010),
    }
    if importlib.util.find_spec("datasets"):
        theirs = step_seconds(hf_steps(folder, length, samples), seconds)
        result |= {"datasets_tokens_per_second": samples * length / theirs, "ratio_to_datasets": ours / theirs}
    return result


def configuration(length: int) -> TrainingConfig:
    document = {
        "model": {"architecture": {**SHAPE, "maxPositions": length}},
        "data": {"train": [{"source": STDLIB}], "sequenceLength": length},
        "batch": {"tokensPerStep": length},
        "length": {"steps": 1},
    }
    return parse(TrainingConfig, document)


def loader_steps(dataset: Dataset, samples: int, prefetch: int) -> Callable[[], object]:
    cursor = DataCursor(seed=dataset.seed, epoch=0, sample=0)
    return Loader(dataset, cursor, samples, samples, DataParallel(1, (0,)), "cpu", prefetch).next


def crop_steps(folder: Path, length: int, samples: int) -> Callable[[], object]:
    """nanoGPT's get_batch (train.py), word for word but for the names."""
    (path,) = [p for p in folder.glob("cache/tokens/*/tokens.bin") if p.stat().st_size > 16e6]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - length, (samples,))
        x = torch.stack([torch.from_numpy((data[i : i + length]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + length]).astype(np.int64)) for i in ix])
        return x, y

    return step


def hf_steps(folder: Path, length: int, samples: int) -> Callable[[], object]:
    """Blocks of `length` tokens as the language-modelling examples group them, shuffled, through a torch DataLoader."""
    import datasets

    (path,) = [p for p in folder.glob("cache/tokens/*/tokens.bin") if p.stat().st_size > 16e6]
    tokens = np.fromfile(path, np.uint16)
    blocks = tokens[: len(tokens) // length * length].reshape(-1, length).astype(np.int64)
    rows = datasets.Dataset.from_dict({"input_ids": blocks}).with_format("torch").shuffle(seed=0)
    loader = torch.utils.data.DataLoader(rows, batch_size=samples, shuffle=True, drop_last=True)

    def endless() -> Any:
        while True:
            yield from loader

    return endless().__next__


def step_seconds(step: Callable[[], object], seconds: float) -> float:
    """Median over the steps of `seconds`, after some that warm up."""
    for _ in range(5):
        step()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def waiting(dataset: Dataset, samples: int, step: float) -> float:
    """Share of the time that next() blocks when each step computes for `step` seconds, outside of Python's lock."""
    cursor = DataCursor(seed=dataset.seed, epoch=0, sample=0)
    loader = Loader(dataset, cursor, samples, samples, DataParallel(1, (0,)), "cpu")
    loader.next()
    waited, began = 0.0, time.perf_counter()
    for _ in range(50):
        time.sleep(step)
        waited += loader.next().wait_seconds
    loader.close()
    return waited / (time.perf_counter() - began)


def packing() -> list[dict[str, Any]]:
    """Best fit over conversations with lengths as chat data has them (log-normal, median 300 tokens)."""
    results = []
    for count in (10_000, 1_000_000):
        lengths = np.random.default_rng(0).lognormal(5.7, 1.0, count)
        sizes = np.clip(lengths, 10, 4096).astype(np.int64)
        began = time.perf_counter()
        _, edges = best_fit(sizes, 4096)
        seconds = time.perf_counter() - began
        results.append(
            {"documents": count, "seconds": seconds, "filled": float(sizes.sum() / ((len(edges) - 1) * 4096))}
        )
    return results


def lines(results: dict[str, Any]) -> str:
    """The results as a person reads them."""
    prepared_lines = [
        f"prepare  {row['tokenizer']:8} {row['tokens']:>12,} tokens in {row['seconds']:6.2f} s: "
        f"{row['tokens_per_second'] / 1e6:6.2f} M tokens/s, {row['megabytes_per_second']:5.1f} MB/s; "
        f"again in {row['seconds_when_prepared'] * 1e3:.0f} ms"
        for row in results["prepare"]
    ]
    batch_lines = [
        f"batches  {row['samples']} × {row['length']:5}: {row['muster_tokens_per_second'] / 1e6:6.1f} M tokens/s, "
        f"{against(row)}; waits {row['wait_at_10_ms']:.1%} of 10 ms steps"
        for row in results["batches"]
    ]
    packing_lines = [
        f"packing  best fit of {row['documents']:>9,} conversations: {row['seconds']:.2f} s, {row['filled']:.2%} filled"
        for row in results["packing"]
    ]
    return "\n".join(["median step times on one thread", *prepared_lines, *batch_lines, *packing_lines])


def against(row: dict[str, Any]) -> str:
    crops = f"{row['ratio_to_crops']:.2f}× crops ({row['crops_tokens_per_second'] / 1e6:.1f} M)"
    if "ratio_to_datasets" not in row:
        return f"{crops}, HF datasets not installed"
    return f"{crops}, {row['ratio_to_datasets']:.3f}× HF datasets ({row['datasets_tokens_per_second'] / 1e6:.2f} M)"


if __name__ == "__main__":
    main()
