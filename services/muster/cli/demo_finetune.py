"""`muster demo --finetune`: a model in transformers' own layout, from random weights to fine-tuned ones.

A small model is made on the spot, pretrained on Python's own source, exported, fine-tuned on conversations beside its
exported weights while a rank is killed, exported again, and opened by transformers, which has never heard of Muster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.cli import demo, demo_checks, processes
from muster.cli.demo import Platform
from muster.cli.demo_checks import CheckFailed, CheckResult, Evidence
from muster.cli.errors import CliError, Exit
from muster.cli.output import say
from muster.contract.adapter_config import Adapter
from muster.contract.base import parse

HELD_OUT = 48  # conversations that no job sees
TOOL_SECONDS_MAX = 600.0
STAGES = ("random", "pretrained", "fine-tuned")
# In a process of its own: the command line imports no torch. Prints a JSON list: of each folder the mean loss per
# token of the held-out conversations, all turns of each.
_JUDGE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
conversations = [json.loads(line)["messages"] for line in open(sys.argv[1])]
losses = []
for folder in sys.argv[2:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    for messages in conversations:
        ids = torch.tensor([tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]])
        with torch.no_grad():
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    losses.append(total / count)
print(json.dumps(losses))
"""


@dataclass(frozen=True)
class FinetuneEvidence:
    """What the demonstration has shown."""

    pretraining: Evidence  # the records of that job
    tuning: Evidence  # likewise
    # The mean loss on the held-out conversations, as transformers computes it, for each of STAGES; empty where
    # transformers could not open the models.
    losses: tuple[float, ...]
    trouble: str  # the end of what transformers wrote to standard error
    adapter: str  # how the model was fine-tuned


def run(examples: Path, state: Path | None, keep: bool, steps: tuple[int, int]) -> FinetuneEvidence:
    """Run the demonstration. Leaves nothing running, however it ends.

    `steps` are the optimizer steps of pretraining and of fine-tuning.
    """
    demo.end_on_signals()
    folder = demo.state_folder(state)
    own = folder / "state"  # beside the models and the conversations: no job reads what lies in the state folder
    own.mkdir()
    left: list[processes.Found] = []
    try:
        try:
            with demo.platform(own) as running:
                gathered = _story(running, examples, folder / "finetune", steps)
        finally:
            left = demo.sweep(own)
        told = tuple(f"{found.pid} {found.what}" for found in left)
        return replace(gathered, tuning=replace(gathered.tuning, left_running=told))
    finally:
        if keep:
            say(f"Everything is kept in {folder} (models, logs, checkpoints, database)")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _story(platform: Platform, examples: Path, work: Path, steps: tuple[int, int]) -> FinetuneEvidence:
    folders = {stage: work / stage for stage in STAGES}
    work.mkdir(parents=True)
    _must(_tool(examples / "make_model.py", "--to", str(folders["random"])), "the model could not be made")
    say(f"A random model in transformers' layout lies in {folders['random']}", "bold")
    train, held_out = _split(examples / "chat.jsonl", work)

    pretraining = _job(platform, work, "pretrain-folder", _pretraining(folders["random"], steps[0]), kills=False)
    _export(pretraining, folders["pretrained"])
    kind = adapter_kind()
    tuning = _job(platform, work, "finetune-folder", _tuning(folders["pretrained"], train, steps[1], kind), kills=True)
    _export(tuning, folders["fine-tuned"])
    say("Opening all three by transformers …", "dim")
    judged = _tool("-c", _JUDGE, str(held_out), *(str(folders[stage]) for stage in STAGES))
    losses = tuple(json.loads(judged.stdout)) if judged.returncode == 0 else ()
    return FinetuneEvidence(pretraining, tuning, losses, judged.stderr.strip()[-800:], kind)


def adapter_kind() -> str:
    """QLoRA, where this Muster has it."""
    try:
        parse(Adapter, {"kind": "qlora"})
    except ValueError:
        return "lora"
    return "qlora"


def _split(chat: Path, work: Path) -> tuple[Path, Path]:
    lines = chat.read_text().splitlines(keepends=True)
    train, held_out = work / "train.jsonl", work / "held-out.jsonl"
    train.write_text("".join(lines[:-HELD_OUT]))
    held_out.write_text("".join(lines[-HELD_OUT:]))
    return train, held_out


def _pretraining(model: Path, steps: int) -> dict[str, Any]:
    return {
        "task": "pretrain",
        "model": {"source": model.as_uri()},
        "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
        "optimizer": {"lr": 3e-3, "schedule": {"name": "cosine", "warmupSteps": 10}},
        "batch": {"tokensPerStep": 2048, "microBatch": 4},
        "parallel": {"shard": "fsdp"},
        "length": {"steps": steps},
        "evaluation": {"every": steps, "holdout": 0.02, "samples": 16},
        "seed": 17,
    }


def _tuning(model: Path, chat: Path, steps: int, kind: str) -> dict[str, Any]:
    return {
        "task": "sft",
        "model": {"source": model.as_uri()},
        "adapter": {"kind": kind, "rank": 16, "alpha": 32, "targets": ["all-linear"]},
        "data": {"train": [{"source": str(chat), "format": "openai-chat"}], "sequenceLength": 256},
        "optimizer": {"lr": 5e-3, "schedule": {"name": "linear", "warmupSteps": 5}},
        "batch": {"tokensPerStep": 2048, "microBatch": 4},
        "parallel": {"shard": "fsdp"},
        "length": {"steps": steps},
        "evaluation": {"every": steps, "holdout": 0.1, "samples": 32},
        "seed": 17,
    }


def _job(platform: Platform, work: Path, name: str, training: dict[str, Any], kills: bool) -> Evidence:
    """Submit, watch to the end, kill a rank on the way if asked to. Raises CliError where it did not succeed."""
    every = max(2, training["length"]["steps"] // 6)
    spec = {"training": training, "gang": {"nodes": 2}, "checkpoint": {"every": every}}
    file = work / f"{name}.json"
    file.write_text(json.dumps({"metadata": {"name": name}, "spec": spec}, indent=2))
    evidence = demo.submit_and_watch(platform, file, kills, sample=False)
    status = evidence.job["status"]
    if status["phase"] != "Succeeded":
        raise CliError(f"{name} is {status['phase']}: {status['because']}", code="demo-job")
    return evidence


def _export(evidence: Evidence, to: Path) -> None:
    name, folder = evidence.job["metadata"]["name"], evidence.job["status"]["checkpoint"]["uri"]
    done = _tool("-m", "muster.cli", "export", folder, "--to", to, "--step", "last")
    _must(done, f"{name} could not be exported")
    say(f"Exported {name} to {to}", "bold")


def _tool(*words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=TOOL_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 1, "", f"took longer than {error.timeout:g} s")


def _must(done: subprocess.CompletedProcess[str], what: str) -> None:
    if done.returncode:
        raise CliError(f"{what}:\n{(done.stderr or done.stdout).strip()[-1500:]}", Exit.FAILED, "demo-tool")


# --- what it promises ---


def run_checks(evidence: FinetuneEvidence) -> tuple[CheckResult, ...]:
    """The demo's own promises of the job that lost a rank, and those of the whole way."""
    of_the_tuning = tuple(
        result for result in demo_checks.run_checks(evidence.tuning) if result.promise != "best commit generates"
    )
    return (*of_the_tuning, *(checked(promise, check, evidence) for promise, check in CHECKS.items()))


def checked(promise: str, check: Callable[[FinetuneEvidence], str], evidence: FinetuneEvidence) -> CheckResult:
    try:
        return CheckResult(promise, True, check(evidence))
    except CheckFailed as error:
        return CheckResult(promise, False, str(error))


def _pretrained(evidence: FinetuneEvidence) -> str:
    losses = [entry["loss"] for entry in evidence.pretraining.metrics["evaluations"]]
    if len(losses) < 2 or not losses[-1] < losses[0]:
        raise CheckFailed(f"the pretraining's held-out loss went {losses}")
    return f"pretraining brought the loss of unseen source files from {losses[0]:.3f} to {losses[-1]:.3f}"


def _tuned_beside(evidence: FinetuneEvidence) -> str:
    training = evidence.tuning.job["spec"]["training"]
    if (training.get("adapter") or {}).get("kind") != evidence.adapter or "pretrained" not in training["model"][
        "source"
    ]:
        raise CheckFailed("the fine-tuning did not start from the exported folder with an adapter")
    return f"{evidence.adapter} beside the exported weights of the pretraining"


def _opened(evidence: FinetuneEvidence) -> str:
    if len(evidence.losses) != len(STAGES):
        raise CheckFailed(f"transformers could not open the folders: {evidence.trouble}")
    return "AutoModelForCausalLM and AutoTokenizer opened the made, the pretrained and the fine-tuned folder"


def _better(evidence: FinetuneEvidence) -> str:
    losses = evidence.losses
    told = ", ".join(f"{stage} {loss:.3f}" for stage, loss in zip(STAGES, losses, strict=False))
    if len(losses) != len(STAGES) or not losses[0] > losses[1] > losses[2]:
        raise CheckFailed(f"held-out conversations are not better at each stage: {told or 'no figures'}")
    return f"loss of {HELD_OUT} conversations that no job saw, by transformers: {told}"


CHECKS: dict[str, Callable[[FinetuneEvidence], str]] = {
    "pretrained from a folder": _pretrained,
    "fine-tuned from the export": _tuned_beside,
    "opened by transformers": _opened,
    "better at each stage": _better,
}


def document(evidence: FinetuneEvidence, results: tuple[CheckResult, ...], seconds: float) -> dict[str, Any]:
    """The report for machines: that of the fine-tuning, and what the stages came to."""
    from muster.cli import demo_report

    return {
        **demo_report.document(evidence.tuning, results, seconds),
        "adapter": evidence.adapter,
        "losses": dict(zip(STAGES, evidence.losses, strict=False)),
    }
