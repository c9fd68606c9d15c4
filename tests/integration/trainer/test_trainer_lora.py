"""An adapter learns beside weights that stay as they are: under every sharding alike, through a crash, into a next job
and into `peft`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.bases import write_base
from tests.integration.trainer.gangs import ARCHITECTURE, Job, Part, train_many, training

from muster.recipe.architecture import Architecture
from muster.recipe.training import TrainingConfig
from muster.storage.file_store import FileStore
from muster.trainer.checkpoint import load
from muster.trainer.convert.export import export
from muster.trainer.convert.load_model import of_commit
from muster.trainer.models.adapter import is_part
from muster.trainer.models.decoder import Decoder, build
from muster.trainer.models.lora import attach
from muster.trainer.train.optimizer import make_optimizer
from muster.words.names import ExitCode
from muster.words.signals import StepRecord

# Real ranks on a machine that may be busy with others: the bound is for broken code only.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 14
LORA = {"kind": "lora", "rank": 3, "alpha": 6.0, "targets": ["q_proj", "v_proj", "down_proj"]}
DROPOUT = LORA | {"dropout": 0.2}
OTHER = {"kind": "lora", "rank": 1, "alpha": 4.0, "targets": ["gate_proj", "o_proj"]}


def write_chat(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
        for word in (f"{a}{b}{a}{a}c" for a in "abcdefgh" for b in "ijklmnop")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def tuned(root: Path, name: str, chat: str, origin: Job, adapter: dict[str, Any], **changes: Any) -> Job:
    document = training(
        chat,
        task="sft",
        model={"from": {"uri": f"file://{origin.folder}", "step": "last"}},
        adapter=adapter,
        data={"train": [{"source": chat, "format": "openai-chat"}], "sequenceLength": 32},
        optimizer={"lr": 1e-2, "schedule": {"warmupSteps": 3}},
        deterministic=True,
    )
    return Job(root / name, document | changes, uid=name)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """On two ranks: adapters beside one base, one of them through a crash, and one beside what another learnt."""
    root = tmp_path_factory.mktemp("lora")
    chat = write_chat(root / "chat.jsonl")
    base = Job(root / "base", training(chat), uid="base")
    write_base(base)
    ddp = tuned(root, "ddp", chat, base, LORA, parallel={"shard": "ddp"})
    repeated = {"shard": "fsdp", "activationCheckpointing": "full"}
    fsdp = tuned(root, "fsdp", chat, base, LORA, parallel=repeated)
    second = tuned(root, "second", chat, ddp, OTHER, parallel={"shard": "fsdp"})
    longer = {"parallel": repeated, "length": {"steps": STEPS}}
    calm, killed = (tuned(root, name, chat, base, DROPOUT, **longer) for name in ("calm", "killed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the launcher would give its ranks another number
        gang = killed.start(ranks=2, dies=(1, 8), forked=True)
        assert gang.ends()[0].exit_code == 137, gang.log()
        parts = [Part(killed, 2, killed.commits()[-1]), *(Part(job) for job in (calm, ddp, fsdp, second))]
        assert train_many(root, 2, parts) == [ExitCode.DONE] * len(parts)
    return {"base": base, "ddp": ddp, "fsdp": fsdp, "second": second, "calm": calm, "killed": killed}


def committed(job: Job) -> Decoder:
    """The newest commit with the adapter as it was trained, weights and optimizer loaded by one rank."""
    config = TrainingConfig.model_validate(job.training)
    decoder = build(Architecture.model_validate(ARCHITECTURE))
    if config.adapter is not None:
        attach(decoder, config.adapter)
    decoder.to_empty(device="cpu")
    optimizer = make_optimizer(decoder, config.optimizer)
    load(f"file://{job.folder}", job.commits()[-1], decoder, optimizer if config.adapter else None)
    assert config.adapter is None or len(optimizer.state) == sum(p.requires_grad for p in decoder.parameters())
    return decoder.eval()


def frozen(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in decoder.named_parameters() if not is_part(name)}


def computed(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    """What must not change by a bit."""
    return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in records]


def logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return decoder(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), torch.zeros_like(tokens))


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 260, (2, 30), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["ddp", "fsdp", "killed"])
def test_the_base_stays_and_the_adapter_learns(jobs: dict[str, Job], name: str) -> None:
    before, after = frozen(committed(jobs["base"])), committed(jobs[name])
    assert frozen(after).keys() == before.keys()
    assert all(torch.equal(weight, before[key]) for key, weight in frozen(after).items())
    learnt = {key: p for key, p in after.named_parameters() if is_part(key)}
    assert len(learnt) == 2 * 3 * 2  # A and B, three targets, two layers
    assert all(part.abs().max() > 1e-3 for part in learnt.values())
    states = [key for key in jobs[name].commit(jobs[name].commits()[-1])["tensors"] if key.startswith("optimizer/")]
    assert len(states) == 3 * len(learnt)
    assert all(is_part(key.removeprefix("optimizer/").rpartition("/")[0]) for key in states)


def test_sharding_changes_nothing(jobs: dict[str, Job]) -> None:
    ddp, fsdp = jobs["ddp"].steps(1), jobs["fsdp"].steps(1)
    assert [r.loss for r in fsdp] == pytest.approx([r.loss for r in ddp], rel=1e-5)
    assert [r.grad_norm for r in fsdp] == pytest.approx([r.grad_norm for r in ddp], rel=1e-3)
    assert len(ddp) == 10
    assert ddp[-1].loss < 0.95 * ddp[0].loss


def test_a_killed_run_goes_on_bit_for_bit(jobs: dict[str, Job]) -> None:
    expected, job = computed(jobs["calm"].steps(1)), jobs["killed"]
    after = computed(job.steps(2))
    resumed_from = STEPS - len(after)
    assert resumed_from in range(1, STEPS)
    assert after == expected[resumed_from:]
    before = computed(job.steps(1))
    assert before == expected[: len(before)]


def test_the_next_job_begins_with_what_the_adapter_learnt(jobs: dict[str, Job]) -> None:
    first, second = committed(jobs["ddp"]), frozen(committed(jobs["second"]))
    parts = dict(first.named_parameters())
    for name, weight in frozen(first).items():
        module = name.removesuffix(".weight")
        a, b = (parts.get(f"{module}.lora_{part}.weight") for part in "AB")
        merged = weight if a is None or b is None else weight + 2.0 * (b @ a).detach()
        torch.testing.assert_close(second[name], merged, rtol=0, atol=1e-6)
    alone = of_commit(f"file://{jobs['ddp'].folder}", "last").module
    assert not any(is_part(name) for name, _ in alone.named_parameters())
    assert (logits(alone, some_tokens()) - logits(first, some_tokens())).abs().max().item() <= 1e-5


def test_peft_and_transformers_compute_the_same(jobs: dict[str, Job], tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    export(FileStore(jobs["base"].folder), "last", tmp_path / "base")
    export(FileStore(jobs["fsdp"].folder), "last", tmp_path / "adapter", form="peft")
    export(FileStore(jobs["fsdp"].folder), "last", tmp_path / "merged")
    tokens, ours = some_tokens(), logits(committed(jobs["fsdp"]), some_tokens())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert (base(tokens).logits - ours).abs().max().item() > 0.01
        assert (merged(tokens).logits - ours).abs().max().item() <= 1e-5
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert (adapted(tokens).logits - ours).abs().max().item() <= 1e-5
        alone = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
        assert (alone(tokens).logits - ours).abs().max().item() <= 1e-5
