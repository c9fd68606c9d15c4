"""Jobs that start from a model's folder: the losses of a plain loop, exact resume, any number of ranks, and an export
that transformers opens. All families train on one set of ranks, one after the other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.gangs import Job, Part, samples, train_many, training, write_corpus
from tests.integration.trainer.plain_loop import plain_losses
from tests.model_families import FAMILIES, write_model

from muster.recipe.training import TrainingConfig
from muster.storage.file_store import FileStore
from muster.trainer.convert.export import export
from muster.trainer.convert.load_model import of_commit
from muster.trainer.data import load_tokenizer, open_data
from muster.words.base import parse
from muster.words.names import ExitCode
from muster.words.signals import StepRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 10
SETS = {
    "few": ("qwen3", "mixtral"),
    "all": tuple(FAMILIES),
}
ALL = pytest.param("all", marks=pytest.mark.long)


ONE_THREAD = ("OMP_NUM_THREADS", "1")  # the launcher would give its ranks another number than train_many


@dataclass(frozen=True)
class Trained:
    """The jobs of one family: without interruption, and stopped and resumed."""

    model: Path
    calm: Job
    stopped: Job


def document_of(source: str, model: Path, **changes: Any) -> dict[str, Any]:
    return training(
        source,
        model={"source": model.as_uri()},
        batch={"tokensPerStep": 256, "microBatch": 2},
        length={"steps": STEPS},
        parallel={"shard": "fsdp"},
        deterministic=True,
        **changes,
    )


@pytest.fixture(scope="module", params=["few", ALL])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    root = tmp_path_factory.mktemp("families")
    source = write_corpus(root / "corpus")
    found = {}
    for family in SETS[request.param]:
        write_model(root / family, family, dtype=torch.bfloat16 if family == "qwen3" else torch.float32)
        document = document_of(source, root / family)
        jobs = [Job(root / f"{family}-{kind}", document, uid=f"{family}-{kind}") for kind in ("calm", "stopped")]
        found[family] = Trained(root / family, *jobs)
    parts = [
        part
        for t in found.values()
        for part in (Part(t.calm), Part(t.stopped, 1, 0, stop_after=4), Part(t.stopped, 2, 4))
    ]
    done = [ExitCode.DONE, ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*ONE_THREAD)
        assert train_many(root / "two", 2, parts) == len(found) * done
    return found


def computed(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    """What must not change by a bit."""
    return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in records]


def test_a_stopped_job_goes_on_bit_for_bit(trained: dict[str, Trained]) -> None:
    for family, t in trained.items():
        assert computed(t.stopped.steps(1, 2)) == computed(t.calm.steps(1)), family


@pytest.mark.parametrize("trained", [ALL], indirect=True, scope="module")
def test_a_killed_job_goes_on_bit_for_bit(
    trained: dict[str, Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense model and a mixture. That every family's state is committed and comes back whole is shown by stopping."""
    chosen = {family: trained[family] for family in SETS["few"]}
    jobs = {family: Job(tmp_path / family, t.calm.training, uid=family) for family, t in chosen.items()}
    monkeypatch.setenv(*ONE_THREAD)
    for job in jobs.values():
        gang = job.start(ranks=2, dies=(1, 5), forked=True)
        assert gang.ends()[0].exit_code == 137, gang.log()
    parts = [Part(job, 2, job.commits()[-1]) for job in jobs.values()]
    assert train_many(tmp_path / "two", 2, parts) == [ExitCode.DONE] * len(parts)
    for family, job in jobs.items():
        expected, before, after = (
            computed(records) for records in (chosen[family].calm.steps(1), job.steps(1), job.steps(2))
        )
        assert before == expected[: len(before)], family
        assert 1 <= STEPS - len(after) < STEPS, family
        assert after == expected[-len(after) :], family


@pytest.mark.parametrize("trained", [ALL], indirect=True, scope="module")
def test_two_ranks_one_and_two_use_every_sample_once(trained: dict[str, Trained], tmp_path: Path) -> None:
    moving = {family: Job(tmp_path / family, t.calm.training, uid=family) for family, t in trained.items()}
    kept, done = [ExitCode.PREEMPTED_COMMITTED] * len(moving), [ExitCode.DONE] * len(moving)
    parts = [Part(job, 1, 0, stop_after=3) for job in moving.values()]
    assert train_many(tmp_path / "two", 2, parts) == kept
    assert train_many(tmp_path / "one", 1, [Part(job, 2, 3, stop_after=6) for job in moving.values()]) == kept
    assert train_many(tmp_path / "two-again", 2, [Part(job, 3, 6) for job in moving.values()]) == done
    for family, t in trained.items():
        moved, expected = moving[family], samples(t.calm, 1, ranks=2, micro_batch=2)
        found = {
            **samples(moved, 1, ranks=2, micro_batch=2),
            **samples(moved, 2, ranks=1, micro_batch=2),
            **samples(moved, 3, ranks=2, micro_batch=2),
        }
        assert found == expected, family
        ids = [sample for step in range(1, STEPS + 1) for sample in found[step]]
        assert len(ids) == STEPS * 8 == len(set(ids))
        losses = [r.loss for r in moved.steps(1, 2, 3)]
        assert losses == pytest.approx([r.loss for r in t.calm.steps(1)], rel=1e-5), family


def test_losses_are_those_of_a_plain_loop(trained: dict[str, Trained]) -> None:
    from transformers import AutoModelForCausalLM

    for family, t in trained.items():
        config = parse(TrainingConfig, t.calm.training, "training")
        tokenizer = load_tokenizer(str(t.model / "tokenizer.json"))
        data = open_data(config, tokenizer, t.calm.root / "cache", lambda line: None)
        theirs = AutoModelForCausalLM.from_pretrained(t.model, dtype=torch.float32).train()
        expected = plain_losses(theirs, config, data.train, STEPS)
        assert [r.loss for r in t.calm.steps(1)] == pytest.approx(expected, abs=1e-5), family


def test_the_export_opens_in_transformers_as_the_same_model(trained: dict[str, Trained], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for family, t in trained.items():
        target = tmp_path / family
        report = export(FileStore(t.calm.folder), STEPS, target)
        assert report["dtype"] == "float32"
        theirs, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (family, info)
        ours = of_commit(t.calm.folder.as_uri(), STEPS).module
        tokens = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = ours(tokens, torch.arange(24).expand(2, 24), torch.zeros_like(tokens))
            found = theirs.eval()(input_ids=tokens, use_cache=False).logits
        assert (found - expected).abs().max() <= 1e-5, family
        assert public_names(target) == public_names(t.model), family
        templates = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", *templates):
            assert (target / name).read_bytes() == (t.model / name).read_bytes(), (family, name)
        was, now = (json.loads((folder / "config.json").read_text()) for folder in (t.model, target))
        assert now == was | {"dtype": "float32"}
        assert (
            AutoTokenizer.from_pretrained(target).decode(AutoTokenizer.from_pretrained(target)("so").input_ids) == "so"
        )


def public_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


def test_every_commit_says_what_was_loaded(trained: dict[str, Trained]) -> None:
    for t in trained.values():
        for job in (t.calm, t.stopped):
            source = job.commit(STEPS)["architecture"]["source"]
            assert source["address"] == t.model.as_uri()
            assert source["files"] == {path.name: path.stat().st_size for path in t.model.glob("*.safetensors")}
