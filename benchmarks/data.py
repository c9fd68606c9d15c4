"""Data: how fast text is prepared, in how much memory, and how fast batches come, against HF datasets and plain crops.

    python benchmarks/data.py [--parts peer,memory,prepare,batches,packing] [--check] [--json]
    python benchmarks/data.py --parts memory --gigabytes 10        # needs some 17 GB in TMPDIR

`peer` prepares the same JSON lines with the same tokenizer by Muster and by `datasets.map` (batched, as many processes
as there are cores), in turns, each as a process of its own with a cold cache: what is compared is a whole preparation
from the start of Python to the last byte, and beside it that without imports, by CPU time, and with what `map` alone
took. `memory` is the highest sum over the preparation's processes of proportional memory (PSS, pages of mapped files
included), for a quarter of the corpus and for the whole.

The other side of `batches` is what nanoGPT's get_batch does: random crops of a token file, no document boundaries, no
positions, no epochs, no resumption. It is the floor of what any loader has to do. Ratios are theirs / ours: above 1,
Muster is slower. `wait` is the share of a step that training waits for data when a step takes as long as given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from muster.recipe.data_config import Source
from muster.recipe.training import TrainingConfig
from muster.storage.sources import STDLIB, find
from muster.trainer.config import DataParallel
from muster.trainer.data import RankLoader, SampleSet, load_tokenizer, open_data
from muster.trainer.data.packing import best_fit
from muster.trainer.data.prepare import prepared
from muster.words.base import parse
from muster.words.checkpoint import DataCursor

SHAPE = {"dim": 128, "layers": 1, "heads": 4, "kvHeads": 4, "ffnDim": 128, "vocabSize": 260}
BATCHES = ((512, 8), (2048, 8), (8192, 2))  # (tokens per sample, samples per step)


PARTS = ("peer", "memory", "prepare", "batches", "packing")
PEER = "datasets.map"
# The aims that --check holds the results against.
SPEED_MIN, WAIT_MAX, MEMORY_MAX = 1.5, 0.01, 500e6
MEMORY_SHARES = (0.25, 1.0)  # of --gigabytes
SAMPLE_SECONDS = 0.1


def main() -> int:
    given = _arguments()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="muster-data-") as temporary:
        folder = Path(temporary)
        parts: dict[str, Callable[[], Any]] = {
            "peer": lambda: peer(folder, given.megabytes * 1e6, given.rounds),
            "memory": lambda: [memory(folder, given.gigabytes * share * 1e9) for share in MEMORY_SHARES],
            "prepare": lambda: preparing(folder),
            "batches": lambda: [batches(folder, length, count, given.seconds) for length, count in BATCHES],
            "packing": packing,
        }
        for part in given.parts:
            results[part] = parts[part]()
    print(json.dumps(results) if given.json else lines(results))
    missed = misses(results)
    for line in missed if given.check else ():
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if given.check and missed else 0


def _arguments() -> argparse.Namespace:
    def parts(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := set(wanted) - set(PARTS):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
        return [part for part in PARTS if part in wanted]  # batches need what is prepared before

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", type=parts, default=list(PARTS), metavar="PART,…", help="what is measured")
    options.add_argument("--megabytes", type=float, default=24, help="JSON lines for `peer`")
    options.add_argument("--rounds", type=int, default=2, help="turns of `peer`")
    options.add_argument("--gigabytes", type=float, default=0.16, help="JSON lines for `memory`, the larger corpus")
    options.add_argument("--seconds", type=float, default=2.0, help="time per measurement of batches")
    options.add_argument("--check", action="store_true", help="end with 1 where an aim is missed")
    options.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return options.parse_args()


def misses(results: dict[str, Any]) -> list[str]:
    found = []
    if "peer" in results and (ratio := results["peer"]["ratio"]) < SPEED_MIN:
        found.append(f"preparation is {ratio:.2f} times as fast as {PEER}, aim {SPEED_MIN}")
    found += [
        f"{row['bytes'] / 1e9:.2f} GB are prepared in {row['peak'] / 1e6:.0f} MB, aim {MEMORY_MAX / 1e6:.0f} MB"
        for row in results.get("memory", ())
        if row["peak"] > MEMORY_MAX
    ]
    found += [
        f"batches of {row['samples']} × {row['length']}: waits {row['wait_at_10_ms']:.2%}, aim {WAIT_MAX:.0%}"
        for row in results.get("batches", ())
        if row["wait_at_10_ms"] > WAIT_MAX
    ]
    return found


# --- preparation as a process of its own ---


def peer(folder: Path, size: float, rounds: int) -> dict[str, Any]:
    """Both sides, in turns. Ratios are medians over neighbours in time: theirs / ours, above 1 Muster is faster."""
    tokenizer, corpus = write_tokenizer(folder), write_corpus(folder / "peer.jsonl", size)
    sides: dict[str, list[dict[str, Any]]] = {"muster": [], PEER: []}
    for turn in range(rounds):
        for side in sides if turn % 2 else reversed(sides):
            sides[side].append(prepared_apart(side, corpus, tokenizer))
    counts = {row["tokens"] for rows in sides.values() for row in rows}
    if len(counts) > 1:
        raise SystemExit(f"the sides made different numbers of tokens, so they did not do the same work: {counts}")

    def ratio(theirs: str, ours: str) -> float:
        pairs = zip(sides[PEER], sides["muster"], strict=True)
        return statistics.median(other[theirs] / mine[ours] for other, mine in pairs)

    return {
        "bytes": corpus.stat().st_size,
        "tokens": counts.pop(),
        "sides": sides,
        "ratio": ratio("wall_seconds", "wall_seconds"),
        "ratio_by_cpu": ratio("cpu_seconds", "cpu_seconds"),
        "ratio_without_imports": ratio("seconds", "seconds"),
        "ratio_of_map_alone": ratio("map_seconds", "seconds"),
    }


def memory(folder: Path, size: float) -> dict[str, Any]:
    tokenizer, corpus = write_tokenizer(folder), write_corpus(folder / "memory.jsonl", size)
    return {"bytes": corpus.stat().st_size} | prepared_apart("muster", corpus, tokenizer, watched=True)


def prepared_apart(side: str, corpus: Path, tokenizer: Path, watched: bool = False) -> dict[str, Any]:
    """What data_sides.py told of one preparation, its wall and CPU seconds and, where it is `watched`, its peak memory.
    To look at a process's memory takes its time, so whatever is timed is not watched."""
    with tempfile.TemporaryDirectory(dir=corpus.parent) as work:
        command = [sys.executable, str(Path(__file__).with_name("data_sides.py")), side, *map(str, (corpus, tokenizer))]
        # datasets starts its own processes, each of which would start as many threads again.
        apart = {"HF_HOME": work, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        before, began = cpu_seconds(), time.perf_counter()
        with (Path(work) / "told").open("w+") as told:
            process = subprocess.Popen([*command, f"{work}/cache"], env=os.environ | apart, stdout=told)
            peak = peak_memory(process) if watched else 0
            process.wait()
            seconds = time.perf_counter() - began
            if process.returncode:
                raise SystemExit(f"{side}: the preparation ended with {process.returncode}")
            told.seek(0)
            found: dict[str, Any] = json.loads(told.read().splitlines()[-1])
    return found | {"wall_seconds": seconds, "cpu_seconds": cpu_seconds() - before, "peak": peak}


def peak_memory(process: subprocess.Popen[bytes]) -> int:
    """Bytes, until it has ended."""
    root, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):  # one of them has just ended
            peak = max(peak, sum(each.memory_full_info().pss for each in (root, *root.children(recursive=True))))
        time.sleep(SAMPLE_SECONDS)
    return peak


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_tokenizer(folder: Path) -> Path:
    """A folder of a BPE tokenizer of 8,000 tokens as both sides read it, trained on a part of the standard library."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    if (folder / "tokenizer.json").exists():
        return folder
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8_000, special_tokens=["<|endoftext|>"], show_progress=False)
    made.train([file.address for file in find(STDLIB, "text")[:60]], trainer)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    made.save(str(folder / "tokenizer.json"))
    return folder


def write_corpus(path: Path, size: float) -> Path:
    """Pieces of the standard library's source as JSON lines, some 3 KB each, cut at random places."""
    whole = "\n".join(Path(file.address).read_text(errors="replace") for file in find(STDLIB, "text"))
    dice = random.Random(1)
    with path.open("w") as file:
        while file.tell() < size:
            begin = dice.randrange(len(whole) - 1)
            text = whole[begin : begin + 1 + int(dice.lognormvariate(7.6, 1.0))]
            file.write(json.dumps({"text": text}) + "\n")
    return path


# --- in this process ---


def preparing(folder: Path) -> list[dict[str, Any]]:
    """The standard library, as bytes and by BPE."""
    results = []
    for name, tokenizer in (
        ("bytes", load_tokenizer("bytes")),
        ("BPE 8k", load_tokenizer(str(write_tokenizer(folder)))),
    ):
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


def loader_steps(dataset: SampleSet, samples: int, prefetch: int) -> Callable[[], object]:
    cursor = DataCursor(seed=dataset.seed, epoch=0, sample=0)
    return RankLoader(dataset, cursor, samples, samples, DataParallel(1, (0,)), "cpu", prefetch).next


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


def waiting(dataset: SampleSet, samples: int, step: float) -> float:
    """Share of the time that next() blocks when each step computes for `step` seconds, outside of Python's lock."""
    cursor = DataCursor(seed=dataset.seed, epoch=0, sample=0)
    loader = RankLoader(dataset, cursor, samples, samples, DataParallel(1, (0,)), "cpu")
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
    told = [f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; step times are medians on one thread"]
    told += peer_lines(results["peer"]) if "peer" in results else ()
    told += [
        f"memory   {row['bytes'] / 1e9:5.2f} GB of JSON lines in {row['wall_seconds']:.0f} s: "
        f"at most {row['peak'] / 1e6:.0f} MB in all processes (aim at most {MEMORY_MAX / 1e6:.0f} MB)"
        for row in results.get("memory", ())
    ]
    told += [
        f"prepare  {row['tokenizer']:8} {row['tokens']:>12,} tokens in {row['seconds']:6.2f} s: "
        f"{row['tokens_per_second'] / 1e6:6.2f} M tokens/s, {row['megabytes_per_second']:5.1f} MB/s; "
        f"again in {row['seconds_when_prepared'] * 1e3:.0f} ms"
        for row in results.get("prepare", ())
    ]
    told += [
        f"batches  {row['samples']} × {row['length']:5}: {row['muster_tokens_per_second'] / 1e6:6.1f} M tokens/s, "
        f"{against(row)}; waits {row['wait_at_10_ms']:.2%} of 10 ms steps (aim at most {WAIT_MAX:.0%})"
        for row in results.get("batches", ())
    ]
    told += [
        f"packing  best fit of {row['documents']:>9,} conversations: {row['seconds']:.2f} s, {row['filled']:.2%} filled"
        for row in results.get("packing", ())
    ]
    return "\n".join(told)


def peer_lines(found: dict[str, Any]) -> list[str]:
    def speed(side: str) -> float:
        return found["tokens"] / statistics.median(row["wall_seconds"] for row in found["sides"][side]) / 1e6

    return [
        f"peer     {found['bytes'] / 1e6:.0f} MB of JSON lines, {found['tokens']:,} tokens: "
        f"{speed('muster'):.2f} M tokens/s, {PEER} {speed(PEER):.2f} M; "
        f"{found['ratio']:.2f}× (aim at least {SPEED_MIN})",
        f"peer     by CPU time {found['ratio_by_cpu']:.2f}×, without imports {found['ratio_without_imports']:.2f}×, "
        f"without imports and against map alone {found['ratio_of_map_alone']:.2f}×",
    ]


def against(row: dict[str, Any]) -> str:
    crops = f"{row['ratio_to_crops']:.2f}× crops ({row['crops_tokens_per_second'] / 1e6:.1f} M)"
    if "ratio_to_datasets" not in row:
        return f"{crops}, HF datasets not installed"
    return f"{crops}, {row['ratio_to_datasets']:.3f}× HF datasets ({row['datasets_tokens_per_second'] / 1e6:.2f} M)"


if __name__ == "__main__":
    sys.exit(main())
