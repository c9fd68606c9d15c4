"""A gang whose rank was killed ends with the bits of an undisturbed one, for every kind of state that a task keeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.bases import write_base
from tests.integration.trainer.gangs import Job, Part, train_many
from tests.integration.trainer.test_trainer_lora import tuned, write_chat
from tests.integration.trainer.test_trainer_preferences import computed, learning, write_pairs
from tests.integration.trainer.test_trainer_rollouts import learning as answering
from tests.integration.trainer.test_trainer_rollouts import scorer_in

from muster.words.names import ExitCode

# Real ranks on a machine that may be busy with others: the bound is for broken code only.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 14
# Dropout, so that a generator that is not where it was would show.
LORA = {"kind": "lora", "rank": 3, "alpha": 6.0, "targets": ["q_proj", "v_proj", "down_proj"], "dropout": 0.2}
GIVEN: dict[str, Any] = {"length": {"steps": STEPS}, "parallel": {"shard": "fsdp"}}

MakeJob = Callable[[Path, str, Job, dict[str, Any]], Job]


def preferring(task: str) -> MakeJob:
    def job(root: Path, name: str, base: Job, changes: dict[str, Any]) -> Job:
        return learning(root, name, base, task, write_pairs(root), **GIVEN, **changes)

    return job


def taught(root: Path, name: str, base: Job, changes: dict[str, Any]) -> Job:
    """A student that begins as its teacher and parts from it by what the data says."""
    adapter, chat = changes.get("adapter"), write_chat(root / "chat.jsonl")
    teacher = {"from": {"uri": f"file://{base.folder}", "step": "last"}}
    return tuned(root, name, chat, base, adapter, **GIVEN, distillation={"teacher": teacher, "weight": 0.6})


def rewarded(root: Path, name: str, base: Job, changes: dict[str, Any]) -> Job:
    """Held against what it started from: a second model, or itself without its adapter."""
    return answering(root, name, base, **GIVEN, grpo={"beta": 0.05}, **changes)


def judged(root: Path, name: str, base: Job, changes: dict[str, Any]) -> Job:
    """A reward model judges beside the verifiers, read by its address."""
    return answering(root, name, base, **GIVEN, grpo={"rewardModel": scorer_in(root)}, **changes)


TASKS: dict[str, MakeJob] = {
    "sft-distillation": taught,
    "dpo": preferring("dpo"),
    "kto": preferring("kto"),
    "grpo": rewarded,
    "grpo-reward-model": judged,
}


# One of each kind of state that a resume must bring back. Objectives themselves keep none, which
# tests/unit/trainer/test_trainer_stateless.py proves for all of them, so that no variant of a loss needs a kill of its
# own. test_trainer_lora.py kills sft with an adapter, test_trainer_crash.py whole models.
CASES = [
    pytest.param("sft-distillation", {}, id="a second model that computes forward"),
    pytest.param("dpo", {"adapter": LORA}, id="stored log-probabilities, and dropout of an adapter"),
    pytest.param("kto", {}, id="a reduction within the loss"),
    pytest.param("grpo", {"adapter": LORA}, id="answers under way, and the model without its adapter as reference"),
    pytest.param("grpo-reward-model", {}, id="a reward model"),
]


@pytest.mark.parametrize(("task", "changes"), CASES)
def test_a_killed_gang_goes_on_bit_for_bit(
    task: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Job(tmp_path / "base", {}, uid="base")
    write_base(base)
    calm, killed = (TASKS[task](tmp_path, name, base, changes) for name in ("calm", "killed"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the launcher would give its ranks another number
    gang = killed.start(ranks=2, dies=(1, 8), forked=True)
    assert gang.ends()[0].exit_code == 137, gang.log()
    resumed_from = killed.commits()[-1]
    assert 0 < resumed_from < STEPS
    assert train_many(tmp_path, 2, [Part(killed, 2, resumed_from), Part(calm)]) == [ExitCode.DONE] * 2
    expected, before = computed(calm.steps(1)), computed(killed.steps(1))
    assert before == expected[: len(before)]
    assert computed(killed.steps(2)) == expected[resumed_from:]
