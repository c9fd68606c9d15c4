"""`make demo-finetune`: from random weights to a model that has learnt what is preferred, opened by transformers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.cli import demo_finetune
from muster.cli.demo_checks import DemoEvidence


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_stage_is_better_and_opens_in_transformers(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-m", "muster.cli", "demo", "--finetune", "--state", str(state), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850)
    report = json.loads(done.stdout)
    assert [(p["promise"], p["because"]) for p in report["promises"] if not p["kept"]] == [], done.stderr[-2000:]
    assert done.returncode == 0
    assert set(demo_finetune.CHECKS) < {promise["promise"] for promise in report["promises"]}
    stages = report["stages"]
    assert stages["random"]["loss"] > stages["pretrained"]["loss"] > stages["fine-tuned"]["loss"]
    assert stages["preferred"]["preference_accuracy"] > stages["fine-tuned"]["preference_accuracy"]
    assert (
        stages["preferred"]["exact_match"] > stages["fine-tuned"]["exact_match"] > stages["pretrained"]["exact_match"]
    )
    assert not state.exists()


def job_of(source: str, adapter: dict[str, Any] | None = None, **metrics: Any) -> DemoEvidence:
    training = {"adapter": adapter, "model": {"source": f"file:///x/{source}"}}
    job = {"id": "x", "spec": {"training": training}, "status": {}}
    return DemoEvidence("http://x", job, (), (), {"points": [], **metrics}, None, "", ())


def evaluations(*accuracies: float | None) -> list[dict[str, Any]]:
    return [{"values": {"rewards/accuracies": accuracy}} for accuracy in accuracies]


# Loss, exact matches and accuracy of preferences after each stage.
JUDGED = ((5.5, 0.0, 0.5), (3.0, 0.0, 0.6), (0.5, 0.4, 0.6), (0.4, 0.5, 0.8))


def evidence(judged: tuple[tuple[float, ...], ...] = JUDGED, **changes: Any) -> demo_finetune.FinetuneEvidence:
    names = ("loss", "exact_match", "preference_accuracy")
    whole = demo_finetune.FinetuneEvidence(
        job_of("random", evaluations=[{"step": 0, "loss": 5.5}, {"step": 60, "loss": 2.9}]),
        job_of("pretrained"),
        job_of("fine-tuned", {"kind": "qlora"}, evaluations=evaluations(0.0, 0.8)),
        tuple(dict(zip(names, stage, strict=True)) for stage in judged),
        "",
    )
    return replace(whole, **changes)


def broken(found: demo_finetune.FinetuneEvidence) -> set[str]:
    results = [demo_finetune.checked(promise, check, found) for promise, check in demo_finetune.CHECKS.items()]
    return {result.promise for result in results if not result.kept}


def stages(number: int, *values: float) -> tuple[tuple[float, ...], ...]:
    return (*JUDGED[:number], values, *JUDGED[number + 1 :])


def test_what_is_kept_and_what_is_broken() -> None:
    of_transformers = {"opened by transformers", "better at each stage", "preferences learnt", "exact answers learnt"}
    assert broken(evidence()) == set()
    assert broken(evidence(stages(2, 3.1, 0.4, 0.6))) == {"better at each stage"}
    assert broken(evidence(stages(0, 3.0, 0.0, 0.5))) == {"better at each stage"}
    assert broken(evidence(stages(3, 0.4, 0.0, 0.8))) == {"exact answers learnt"}
    assert broken(evidence(stages(3, 0.4, 0.3, 0.8))) == {"exact answers learnt"}, "more than at the beginning only"
    assert broken(evidence(stages(3, 0.4, 0.5, 0.6))) == {"preferences learnt"}
    assert broken(evidence((), trouble="boom")) == of_transformers
    assert broken(evidence(tuning=job_of("random"))) == {"started from exports"}
    whole = job_of("fine-tuned", None, evaluations=evaluations(0.0, 0.8))
    assert broken(evidence(preferring=whole)) == {"started from exports"}
    lora = job_of("fine-tuned", {"kind": "lora"}, evaluations=evaluations(0.0, 0.8))
    assert broken(evidence(preferring=lora)) == {"started from exports"}
    unsure = job_of("fine-tuned", {"kind": "qlora"}, evaluations=evaluations(0.0, 0.5))
    assert broken(evidence(preferring=unsure)) == {"preferences reported"}
    worse = job_of("random", evaluations=[{"loss": 2.0}, {"loss": 2.5}])
    assert broken(evidence(pretraining=worse)) == {"pretrained from a folder"}
