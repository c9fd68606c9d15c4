"""`muster demo --finetune`: a model in transformers' own layout, from random weights to preferences.

A small model is made on the spot, pretrained on Python's own source, exported, and fine-tuned on conversations from its
exported weights. What it then still answers wrongly becomes pairs of answers. A QLoRA adapter alongside the exported
weights learns from them by direct preference optimisation, and a rank is killed meanwhile. Each stage is opened and
judged by transformers, which has never heard of Muster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.cli import demo, demo_checks, processes
from muster.cli.demo import DemoPlatform
from muster.cli.demo_checks import CheckFailed, CheckResult, DemoEvidence
from muster.cli.errors import CliError, ExitStatus
from muster.cli.output import say

HELD_OUT_SEED = 18  # of the conversations that no job sees
TOOL_SECONDS_MAX = 600.0
STAGES = ("random", "pretrained", "fine-tuned", "preferred")


@dataclass(frozen=True)
class FinetuneEvidence:
    """Results of the demonstration."""

    pretraining: DemoEvidence  # the records of that job
    tuning: DemoEvidence  # likewise
    preferring: DemoEvidence  # likewise
    # What transformers says of held-out conversations and pairs, for each of STAGES (examples/judge_models.py); empty
    # where it could not open the models.
    judged: tuple[dict[str, float], ...]
    trouble: str  # the end of what transformers wrote to standard error

    def of(self, metric: str) -> tuple[float, ...]:
        """One number for each stage."""
        return tuple(each[metric] for each in self.judged)


def run(examples: Path, state: Path | None, keep: bool, steps: tuple[int, int, int]) -> FinetuneEvidence:
    """Run the demonstration. Leaves nothing running, however it ends.

    `steps` are the optimizer steps of pretraining, of fine-tuning and of learning preferences.
    """
    demo.end_on_signals()
    folder = demo.state_folder(state)
    own = folder / "state"  # beside the models and the conversations: no job reads what lies in the state folder
    own.mkdir()
    left: list[processes.FoundProcess] = []
    try:
        try:
            with demo.platform(own) as running:
                gathered = _story(running, examples, folder / "finetune", steps)
        finally:
            left = demo.sweep(own)
        leftovers = tuple(f"{each.pid} {each.what}" for each in left)
        return replace(gathered, preferring=replace(gathered.preferring, left_running=leftovers))
    finally:
        if keep:
            say(f"Everything is kept in {folder} (models, logs, checkpoints, database)")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _story(platform: DemoPlatform, examples: Path, work: Path, steps: tuple[int, int, int]) -> FinetuneEvidence:
    folders = {stage: work / stage for stage in STAGES}
    work.mkdir(parents=True)
    _must(_tool(examples / "make_model.py", "--to", folders["random"]), "the model could not be made")
    say(f"A random model in transformers' layout lies in {folders['random']}", "bold")
    train, held_out = examples / "chat.jsonl", _held_out(examples, work)

    pretraining = _job(platform, work, "pretrain-folder", _pretraining(folders["random"], steps[0]), kills=False)
    _export(pretraining, folders["pretrained"])
    tuning = _job(platform, work, "finetune-folder", _tuning(folders["pretrained"], train, steps[1]), kills=False)
    _export(tuning, folders["fine-tuned"])
    pairs = _mistakes(examples, folders["fine-tuned"], train, work / "train-pairs.jsonl", draws=2)
    held_pairs = _mistakes(examples, folders["fine-tuned"], held_out, work / "held-out-pairs.jsonl", draws=1)
    preferring = _job(
        platform,
        work,
        "prefer-folder",
        _preferring(folders["fine-tuned"], pairs, held_pairs, held_out, steps[2]),
        kills=True,
    )
    _export(preferring, folders["preferred"])
    say("Opening all four by transformers …", "dim")
    asked = ("--chat", held_out, "--preferences", held_pairs)
    judged = _tool(examples / "judge_models.py", *asked, *(folders[stage] for stage in STAGES))
    scores = tuple(json.loads(judged.stdout)) if judged.returncode == 0 else ()
    return FinetuneEvidence(pretraining, tuning, preferring, scores, judged.stderr.strip()[-800:])


def _mistakes(examples: Path, model: Path, chat: Path, pairs: Path, draws: int) -> Path:
    """Pairs of right answers and of what the model says instead to the questions of `chat`."""
    words = ("--model", model, "--chat", chat, "--to", pairs, "--draws", draws)
    _must(_tool(examples / "answer_preferences.py", *words), "no preferences could be made")
    say(f"{len(pairs.read_text().splitlines())} pairs of the right answer and the model's own lie in {pairs}", "bold")
    return pairs


def _held_out(examples: Path, work: Path) -> Path:
    """Hundreds of conversations like those of examples/chat.jsonl, but none of those: with a few, the stages can't be
    told apart."""
    held_out = work / "held-out.jsonl"
    _must(_tool(examples / "make_chat.py", "--seed", HELD_OUT_SEED, "--to", held_out), "no conversations could be made")
    seen = set((examples / "chat.jsonl").read_text().splitlines())
    held_out.write_text("".join(f"{line}\n" for line in held_out.read_text().splitlines() if line not in seen))
    return held_out


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


def _tuning(model: Path, chat: Path, steps: int) -> dict[str, Any]:
    return {
        "task": "sft",
        "model": {"source": model.as_uri()},
        "data": {"train": [{"source": str(chat), "format": "openai-chat"}], "sequenceLength": 256},
        "optimizer": {"lr": 4e-3, "schedule": {"name": "linear", "warmupSteps": 5}},
        # Small steps, and many of them: so small a model learns to repeat what it is asked by their number.
        "batch": {"tokensPerStep": 1024, "microBatch": 2},
        "parallel": {"shard": "fsdp"},
        "length": {"steps": steps},
        "evaluation": {"every": steps, "holdout": 0.1, "samples": 32},
        "seed": 17,
    }


def _preferring(model: Path, pairs: Path, held_pairs: Path, held_out: Path, steps: int) -> dict[str, Any]:
    answers = {"maxTokens": 96, "verifiers": [{"exactMatch": {}}]}
    return {
        "task": "dpo",
        # DPO alone lowers the right answers too, as long as it lowers the wrong ones more.
        "dpo": {"beta": 0.1, "sftWeight": 5.0},
        "model": {"source": model.as_uri()},
        "adapter": {"kind": "qlora", "rank": 16, "alpha": 32, "targets": ["all-linear"]},
        "data": {
            "train": [{"source": str(pairs), "format": "preference"}],
            "sequenceLength": 384,
            "truncation": "left",
        },
        "optimizer": {"lr": 2e-3, "schedule": {"name": "linear", "warmupSteps": 5}},
        "batch": {"tokensPerStep": 3072, "microBatch": 4},
        "parallel": {"shard": "fsdp"},
        "length": {"steps": steps},
        "evaluation": {
            "every": steps,
            "samples": 64,
            "data": [{"source": str(held_pairs), "format": "preference"}],
            "sets": {
                "questions": {"data": [{"source": str(held_pairs), "format": "preference"}], "answers": answers},
            },
        },
        "seed": 17,
    }


def _job(platform: DemoPlatform, work: Path, name: str, training: dict[str, Any], kills: bool) -> DemoEvidence:
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


def _export(evidence: DemoEvidence, to: Path) -> None:
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
        raise CliError(f"{what}:\n{(done.stderr or done.stdout).strip()[-1500:]}", ExitStatus.FAILED, "demo-tool")


# --- what it promises ---


def run_checks(evidence: FinetuneEvidence) -> tuple[CheckResult, ...]:
    """The demo's own promises of the job that lost a rank, and those of the whole way."""
    of_the_job = tuple(
        result
        for result in demo_checks.run_checks(evidence.preferring)
        if result.promise != "best checkpoint generates"
    )
    return (*of_the_job, *(checked(promise, check, evidence) for promise, check in CHECKS.items()))


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


def _beside_exports(evidence: FinetuneEvidence) -> str:
    tuning, preferring = (job.job["spec"]["training"] for job in (evidence.tuning, evidence.preferring))
    sources = [Path(training["model"]["source"] or "").name for training in (tuning, preferring)]
    kind = (preferring.get("adapter") or {}).get("kind")
    if sources != ["pretrained", "fine-tuned"] or kind != "qlora":
        raise CheckFailed(f"the jobs started from {sources}, the last with adapter {kind}")
    return f"the whole model from the pretraining's export, then {kind} beside the weights of the fine-tuning's"


def _opened(evidence: FinetuneEvidence) -> str:
    if len(evidence.judged) != len(STAGES):
        raise CheckFailed(f"transformers could not open the folders: {evidence.trouble}")
    return f"AutoModelForCausalLM and AutoTokenizer opened {', '.join(STAGES)}"


def _better(evidence: FinetuneEvidence) -> str:
    # Preferences are learnt by comparing answers: that stage is judged by its answers, in _prefers and _answers.
    losses = evidence.of("loss")[:3]
    figures = ", ".join(f"{stage} {loss:.3f}" for stage, loss in zip(STAGES, losses, strict=False))
    if len(losses) != 3 or not losses[0] > losses[1] > losses[2]:
        raise CheckFailed(f"held-out conversations are not better at each stage: {figures or 'no figures'}")
    return f"loss of conversations that no job saw, by transformers: {figures}"


def _prefers(evidence: FinetuneEvidence) -> str:
    """Return whether DPO improved on the fine-tuned model that it started from."""
    what = "held-out pairs whose right answer is held for the likelier one"
    values = evidence.of("preference_accuracy")[2:]
    if len(values) != 2 or not values[1] > values[0]:
        raise CheckFailed(f"{what}: {_shares(values)}")
    return f"{what}, by transformers: {values[0]:.1%} fine-tuned, {values[1]:.1%} after DPO"


def _answers(evidence: FinetuneEvidence) -> str:
    """Return whether each stage has improved the answers."""
    what = "held-out questions whose likeliest answer is the right one"
    values = evidence.of("exact_match")[1:]
    if len(values) != 3 or not values[2] > values[1] > values[0]:
        raise CheckFailed(f"{what}: {_shares(values)}")
    figures = f"{values[0]:.1%} pretrained, {values[1]:.1%} fine-tuned, {values[2]:.1%} after DPO"
    return f"{what}, by transformers: {figures}"


def _shares(values: Sequence[float]) -> str:
    return " → ".join(f"{value:.1%}" for value in values) or "no figures"


def _reported(evidence: FinetuneEvidence) -> str:
    """The platform's own evaluations say the same."""
    evaluations = evidence.preferring.metrics["evaluations"]
    name = "rewards/accuracies"
    values = [each["values"].get(name) for each in evaluations]
    if len(values) < 2 or values[-1] is None or not values[-1] > 0.5:
        raise CheckFailed(f"{name} of the held-out pairs went {values}, and should end above one half")
    return f"{name} of the held-out pairs is {values[-1]:.1%} in the job's records"


CHECKS: dict[str, Callable[[FinetuneEvidence], str]] = {
    "pretrained from a folder": _pretrained,
    "started from exports": _beside_exports,
    "opened by transformers": _opened,
    "better at each stage": _better,
    "preferences learnt": _prefers,
    "exact answers learnt": _answers,
    "preferences reported": _reported,
}


def document(evidence: FinetuneEvidence, results: tuple[CheckResult, ...], seconds: float) -> dict[str, Any]:
    """The report for machines: that of the job that lost a rank, and what the stages came to."""
    from muster.cli import demo_report

    return {
        **demo_report.document(evidence.preferring, results, seconds),
        "stages": dict(zip(STAGES, evidence.judged, strict=False)),
    }
