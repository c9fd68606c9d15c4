"""`make demo-finetune`, with fewer steps: from random weights to a fine-tuned model that transformers opens."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.cli import demo_finetune
from muster.cli.demo_checks import Evidence


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_stage_is_better_and_opens_in_transformers(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-m", "muster.cli", "demo", "--finetune", "--state", str(state), "--json"]
    steps = ["--pretrain-steps", "60", "--finetune-steps", "48"]
    done = subprocess.run([*command, *steps], capture_output=True, text=True, check=False, timeout=850)
    report = json.loads(done.stdout)
    assert [(p["promise"], p["because"]) for p in report["promises"] if not p["kept"]] == [], done.stderr[-2000:]
    assert done.returncode == 0
    assert set(demo_finetune.CHECKS) < {promise["promise"] for promise in report["promises"]}
    losses = report["losses"]
    assert losses["random"] > losses["pretrained"] > losses["fine-tuned"]
    assert not state.exists()


def evidence(**changes: Any) -> demo_finetune.FinetuneEvidence:
    metrics = {"evaluations": [{"step": 0, "loss": 5.5}, {"step": 60, "loss": 2.9}], "points": []}
    training = {"adapter": {"kind": "lora"}, "model": {"source": "file:///x/pretrained"}}
    job = {"id": "x", "spec": {"training": training}, "status": {}}
    job_records = Evidence("http://x", job, (), (), metrics, None, "", ())
    whole = demo_finetune.FinetuneEvidence(job_records, job_records, (5.5, 3.0, 1.0), "", "lora")
    return replace(whole, **changes)


def broken(found: demo_finetune.FinetuneEvidence) -> set[str]:
    results = [demo_finetune.checked(promise, check, found) for promise, check in demo_finetune.CHECKS.items()]
    return {result.promise for result in results if not result.kept}


def test_what_is_kept_and_what_is_broken() -> None:
    assert broken(evidence()) == set()
    assert broken(evidence(losses=(5.5, 3.0, 3.1))) == {"better at each stage"}
    assert broken(evidence(losses=(3.0, 3.0, 1.0))) == {"better at each stage"}
    assert broken(evidence(losses=(), trouble="boom")) == {"opened by transformers", "better at each stage"}
    assert broken(evidence(adapter="qlora")) == {"fine-tuned from the export"}
    worse = replace(evidence().pretraining, metrics={"evaluations": [{"loss": 2.0}, {"loss": 2.5}], "points": []})
    assert broken(evidence(pretraining=worse)) == {"pretrained from a folder"}
