"""The reward curve of Muster's `task: grpo` beside that of TRL's GRPOTrainer: one task, one model, several seeds.

    python benchmarks/grpo.py [--seeds 4] [--steps 100] [--jobs 2] [--our-rate FACTOR] [--check] [--json FILE]

A small Llama learns sums, such as `7+5=`, from examples until it gets about two in five right. From there on both
sides reward right answers alone: the same prompts, groups, loss, optimizer and learning rate. Both draw their answers,
each by random numbers of its own, so that no two curves are equal, whoever made them; what is asked is whether the
sides differ by more than seeds do.

The distance of two sides is the mean, over windows of steps, of how far the means of their curves are apart. If the
side made no difference, any division of all runs into two halves would be as likely as the real one: the share of the
divisions whose distance is at least the real one is p (an exact permutation test). Below 0.05 the curves differ.
`--our-rate 2` lets Muster learn at twice the rate, to see that a difference is found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SIDES = ("muster", "trl")
PROMPTS, GROUP, ANSWER_TOKENS, ROW = 16, 8, 4, 16  # of a step; answers to each; at most; tokens of prompt and answer
NUMBERS = range(10)  # what is added
RATE, BETAS, CLIP = 4e-4, (0.9, 0.999), 1.0
WINDOWS = 10  # of the curves
P_MIN = 0.05
LEARNT_MIN = 0.1  # by which the reward must rise on both sides: two flat curves would be equal for no reason

Curve = list[float]


def main() -> int:
    given = _arguments()
    if given.side:
        _trl(given)
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="muster-grpo-") as folder:
        home = Path(folder)
        write_model(home / "model")
        write_prompts(home / "prompts.jsonl")
        runs = list(itertools.product(range(1, given.seeds + 1), SIDES))
        with ThreadPoolExecutor(given.jobs) as threads:
            curves = list(threads.map(lambda run: _curve(run[1], run[0], given, home), runs))
    found = {side: [c for (_, of), c in zip(runs, curves, strict=True) if of == side] for side in SIDES}
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    failed = _report(found)
    print(f"{len(runs)} runs of {given.steps} steps in {(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if given.check and failed else 0


# --- the model and its prompts ---


def sums() -> list[tuple[str, str]]:
    """Every prompt with its answer."""
    return [(f"{a}+{b}=", str(a + b)) for a in NUMBERS for b in NUMBERS]


def write_prompts(path: Path) -> None:
    path.write_text("".join(json.dumps({"prompt": p, "completion": a, "answer": a}) + "\n" for p, a in sums()))


def write_model(folder: Path, accurate: float = 0.35) -> None:
    """A Llama that knows `accurate` of the sums by drawing its answers, and a tokenizer of single bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    marks = ["<|end|>", "<|pad|>"]
    pieces = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(marks)
    torch.manual_seed(17)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(pieces),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
        )
    )
    texts = [(tokenizer.encode(prompt).ids, [*tokenizer.encode(answer).ids, 0]) for prompt, answer in sums()]
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    tokens = torch.tensor([[*p, *a] + [1] * (longest - len(p) - len(a)) for p, a in texts])
    labels = torch.tensor(
        [[-100] * len(p) + a + [-100] * (longest - len(p) - len(a)) for p, a in texts]
    )  # of the answers alone
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dice = torch.Generator().manual_seed(17)
    right = 0.0
    while right < accurate:
        for _ in range(10):
            rows = torch.randint(len(texts), (128,), generator=dice)
            model(input_ids=tokens[rows], labels=labels[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        right = _right(model, tokens, labels)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": marks[0], "pad_token": marks[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    print(f"both sides begin with a model that draws the right answer of {right:.0%} of {len(texts)} sums", flush=True)


def _right(model: Any, tokens: Any, labels: Any) -> float:
    """The mean probability of the right answers, which is the mean reward of answers that are drawn."""
    import torch

    with torch.no_grad():
        chances = torch.log_softmax(model(input_ids=tokens).logits[:, :-1], dim=-1)
    wanted = labels[:, 1:]
    of_tokens = chances.gather(2, wanted.clamp_min(0)[..., None])[..., 0]
    return float((of_tokens * (wanted >= 0)).sum(1).exp().mean())


# --- the sides ---


def _curve(side: str, seed: int, given: argparse.Namespace, home: Path) -> Curve:
    """The mean reward of the answers of each step, of a run in a process of its own."""
    work = home / f"{side}-{seed}"
    work.mkdir()
    command, environ = _muster(seed, given, home, work) if side == "muster" else _trl_command(seed, given, home, work)
    environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environ |= {"HF_HOME": str(home / "hub"), "HF_DATASETS_CACHE": str(work / "datasets")}
    with (work / "log").open("w") as log:
        done = subprocess.run(command, cwd=work, env=os.environ | environ, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{side}, seed {seed}: ended with {done.returncode}\n{(work / 'log').read_text()[-4000:]}")
    curve = _muster_rewards(work) if side == "muster" else json.loads((work / "rewards.json").read_text())
    assert len(curve) == given.steps, f"{side}, seed {seed}: {len(curve)} steps were told of {given.steps}"
    print(f"  {side}, seed {seed}: from {curve[0]:.3f} to {statistics.fmean(curve[-10:]):.3f}", flush=True)
    return curve


def _muster(seed: int, given: argparse.Namespace, home: Path, work: Path) -> tuple[list[str], dict[str, str]]:
    training = {
        "task": "grpo",
        "model": {"source": (home / "model").as_uri()},
        "grpo": {"verifiers": [{"exactMatch": {}}], "completions": GROUP, "maxTokens": ANSWER_TOKENS},
        "data": {"train": [{"source": str(home / "prompts.jsonl")}], "sequenceLength": ROW},
        "optimizer": {
            "lr": RATE * given.our_rate,
            "betas": BETAS,
            "weightDecay": 0.0,
            "clipNorm": CLIP,
            "schedule": {"name": "constant", "warmupSteps": 0},
        },
        "batch": {"tokensPerStep": PROMPTS * GROUP * ROW, "microBatch": PROMPTS * GROUP},
        "length": {"steps": given.steps},
        "seed": seed,
    }
    environ = {
        "MUSTER_JOB_UID": work.name,
        "MUSTER_CONFIG": json.dumps({"training": training, "checkpoint": {"every": given.steps}}),
        "MUSTER_CHECKPOINT_URI": f"file://{work}/checkpoints",
        "MUSTER_WORKER_DIR": str(work),
        "MUSTER_CACHE_DIR": str(work / "cache"),
        "MUSTER_DEVICE": "cpu",
    }
    return [sys.executable, "-m", "muster.trainer"], environ


def _muster_rewards(work: Path) -> Curve:
    from muster.words.names import STEP_LOG
    from muster.words.signals import StepRecord

    records = map(StepRecord.model_validate_json, (work / STEP_LOG).read_text().splitlines())
    return [record.values["reward"] for record in records if record.step]


def _trl_command(seed: int, given: argparse.Namespace, home: Path, work: Path) -> tuple[list[str], dict[str, str]]:
    options = ["--side", str(home), "--seed", str(seed), "--steps", str(given.steps)]
    return [sys.executable, str(Path(__file__).resolve()), *options], {}


def _trl(given: argparse.Namespace) -> None:
    """TRL's side, in this process; the rewards go to rewards.json in the working folder."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(said.strip() == wanted) for said, wanted in zip(completions, answer, strict=True)]

    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(given.side / "model"),
        reward_funcs=is_right,
        args=GRPOConfig(
            output_dir="out",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            seed=given.seed,
            max_steps=given.steps,
            per_device_train_batch_size=PROMPTS * GROUP,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_generations=GROUP,
            max_completion_length=ANSWER_TOKENS,
            loss_type="dapo",
            beta=0.0,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=CLIP,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in sums()]),
        processing_class=AutoTokenizer.from_pretrained(given.side / "model"),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    Path("rewards.json").write_text(json.dumps(rewards))


# --- the report ---


def windows(curve: Curve) -> Curve:
    """The means of WINDOWS parts of a curve."""
    edges = [round(number * len(curve) / WINDOWS) for number in range(WINDOWS + 1)]
    return [statistics.fmean(curve[first:last]) for first, last in itertools.pairwise(edges)]


def distance(some: list[Curve], others: list[Curve]) -> float:
    """The mean, over windows, of how far the means of two sets of curves are apart."""
    means = [[statistics.fmean(values) for values in zip(*curves, strict=True)] for curves in (some, others)]
    return statistics.fmean(abs(mine - theirs) for mine, theirs in zip(*means, strict=True))


def p_value(ours: list[Curve], theirs: list[Curve]) -> float:
    """The share of all divisions of the curves into two sides that are at least as far apart as these."""
    every, real = [*ours, *theirs], distance(ours, theirs)
    numbers = range(len(every))
    apart = [
        distance([every[n] for n in mine], [every[n] for n in numbers if n not in mine])
        for mine in itertools.combinations(numbers, len(ours))
    ]
    return sum(each >= real - 1e-12 for each in apart) / len(apart)


def _report(found: dict[str, list[Curve]]) -> bool:
    """Print both curves. Returns whether they differ, or show nothing."""
    ours, theirs = ([windows(curve) for curve in found[side]] for side in SIDES)
    steps = len(found["muster"][0])
    print(f"\n{'until step':>10} {'Muster':>15} {'TRL':>15} {'apart':>8}")
    for number, (mine, other) in enumerate(zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)):
        apart = statistics.fmean(mine) - statistics.fmean(other)
        print(f"{round((number + 1) * steps / WINDOWS):10d} {_told(mine):>15} {_told(other):>15} {apart:+8.3f}")
    p = p_value(ours, theirs)
    print(f"mean reward of {len(ours)} seeds ± standard deviation between them")
    differ = "within the noise" if p >= P_MIN else "MISSED: they differ"
    print(f"the curves are {distance(ours, theirs):.3f} apart; p = {p:.3f}: {differ}")
    flat = False
    for side, curves in zip(SIDES, (ours, theirs), strict=True):
        rise = statistics.fmean(curve[-1] - curve[0] for curve in curves)
        if rise < LEARNT_MIN:
            flat = True
            print(f"MISSED: {side} learnt nothing: its reward rose by {rise:.3f}")
    return flat or p < P_MIN


def _told(values: tuple[float, ...]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {spread:.3f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="runs of each side")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, of one thread each")
    parser.add_argument("--our-rate", type=float, default=1.0, metavar="FACTOR", help="of the learning rate of Muster")
    parser.add_argument("--check", action="store_true", help="end with 1 where the curves differ or do not rise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all curves there too")
    parser.add_argument("--side", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # be TRL's side
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
