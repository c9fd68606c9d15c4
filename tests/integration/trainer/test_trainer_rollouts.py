"""Task grpo keeps the trainer's promises: the same bits after a kill, every prompt once on any ranks, and it learns."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.bases import write_base
from tests.integration.trainer.gangs import Job, Part, samples, train_many, training
from tests.integration.trainer.test_trainer_preferences import computed

from muster.trainer.models.scoring import ScoreHead
from muster.words.names import ExitCode

# Real ranks on a machine that may be busy with others: the bound is for broken code only.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

LORA = {"kind": "lora", "rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
STEPS = 12
PRINTABLE = {"regex": {"pattern": "^[ -~]+$"}, "name": "printable"}


def learning(root: Path, name: str, base: Job, **changes: Any) -> Job:
    """Prompts of two letters; what is rewarded is to answer in printable characters, and by the second letter."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / "prompts.jsonl"
    asked = [f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    file.write_text("".join(json.dumps({"prompt": word, "completion": word[1]}) + "\n" for word in asked))
    grpo = {"verifiers": [PRINTABLE, {"exactMatch": {}}], "completions": 4, "maxTokens": 3, "iterations": 2}
    document = training(
        "",
        task="grpo",
        grpo=grpo | changes.pop("grpo", {}),
        model={"from": {"uri": f"file://{base.folder}", "step": "last"}},
        data={"train": [{"source": str(file)}], "sequenceLength": 8},
        batch={"tokensPerStep": 8 * 16, "microBatch": 2},
        optimizer={"lr": 1e-2, "schedule": {"warmupSteps": 1}},
        length={"steps": STEPS},
        evaluation={
            "every": 5,
            "samples": 8,
            "sets": {"held": {"data": [{"source": str(file)}], "answers": {"verifiers": [PRINTABLE], "maxTokens": 3}}},
            "metric": "held/printable",
        },
        deterministic=True,
    )
    return Job(root / name, document | changes, uid=name)


def scorer_in(root: Path) -> dict[str, Any]:
    """grpo.rewardModel: a commit of a job of task reward in this folder."""
    judge = Job(root / "judge", {}, uid="judge")
    if not judge.commits():
        write_base(judge, ScoreHead(1, 258))
    return {"from": {"uri": f"file://{judge.folder}", "step": "last"}, "weight": 0.5}


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_rewards_are_learnt_and_go_on_bit_for_bit(tmp_path: Path, shard: str) -> None:
    base = Job(tmp_path / "base", {}, uid="base")
    write_base(base)
    given: dict[str, Any] = {"parallel": {"shard": shard}}
    adapter: dict[str, Any] = {**given, "adapter": LORA, "grpo": {"beta": 0.05}}
    whole, stopped = (learning(tmp_path, name, base, **given) for name in ("whole", "stopped"))
    apart, held = (learning(tmp_path, name, base, **adapter) for name in ("apart", "held"))
    parts = [
        Part(whole),
        Part(stopped, 1, 0, 5),
        Part(stopped, 2, 5),
        Part(apart),
        Part(held, 1, 0, 7),
        Part(held, 2, 7),
    ]
    codes = [ExitCode.DONE, ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE] * 2
    assert train_many(tmp_path, 2, parts) == codes
    assert computed(stopped.steps(1, 2)) == computed(whole.steps(1))
    assert computed(held.steps(1, 2)) == computed(apart.steps(1))
    first, last = whole.steps(1)[1], whole.steps(1)[-1]
    assert last.values["rewards/printable"] > first.values["rewards/printable"] + 0.2
    assert 0 < last.values["clip_ratio"] < 1
    assert last.evaluation_values["held/printable"] > 0.5
    assert apart.steps(1)[-1].values["kl"] > 0


@pytest.mark.parametrize("changes", [{}, {"adapter": LORA}], ids=["full", "adapter"])
def test_two_ranks_then_one_then_two_answer_every_prompt_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With all that a job can have beside its own model: a reward model, and what a whole one is held against."""
    base = Job(tmp_path / "base", {}, uid="base")
    write_base(base)
    grpo = {"beta": 0.05, "rewardModel": scorer_in(tmp_path)}
    given: dict[str, Any] = {"parallel": {"shard": "fsdp"}, "grpo": grpo, **changes}
    calm, job = (learning(tmp_path, name, base, **given) for name in ("calm", "job"))
    stops = [ExitCode.PREEMPTED_COMMITTED]
    assert train_many(tmp_path, 2, [Part(job, 1, 0, stop_after=4)]) == stops
    assert train_many(tmp_path, 1, [Part(calm), Part(job, 2, 4, stop_after=8)]) == [ExitCode.DONE, *stops]
    assert train_many(tmp_path, 2, [Part(job, 3, 8)]) == [ExitCode.DONE]
    found = {step: ids for n, ranks in ((1, 2), (2, 1), (3, 2)) for step, ids in samples(job, n, ranks, 1).items()}
    assert found == samples(calm, 1, ranks=1, micro_batch=1)
    ids = [sample for step in range(1, STEPS + 1) for sample in found[step]]
    assert len(ids) == STEPS * 4 == len(set(ids))
    values = [step.values for step in job.steps(1, 2, 3)]
    assert all(each["kl"] > 0 and each["rewards/reward_model"] for each in values)
    # Later steps part: an answer that is another by rounding is learnt from as well.
    assert values[0] == pytest.approx(calm.steps(1)[0].values, rel=1e-3)
