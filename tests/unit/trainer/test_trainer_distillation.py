"""Distillation: loss and gradients are autograd's of the formula, a teacher that can't teach is refused, and a resumed
job has the same one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.integration.checkpoint.one_rank import identity, outcomes, state
from tests.model_families import edit_json, write_model
from torch import Tensor

from muster.plan import fitting
from muster.plan.layouts import ModelLayout
from muster.plan.memory import LOGIT_CHUNK_BYTES, estimate
from muster.plan.model_size import decoder_size
from muster.recipe.architecture import Architecture
from muster.recipe.commits_read import TEACHER, commits_read, with_folder
from muster.recipe.training import TrainingConfig
from muster.storage.model_source import model_facts
from muster.trainer.checkpoint import CheckpointSaver
from muster.trainer.config import RankPosition
from muster.trainer.data import load_tokenizer
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import empty_sample
from muster.trainer.errors import UserError
from muster.trainer.models import sharding
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.distillation import TeacherPredictions
from muster.trainer.models.head import cross_entropy
from muster.trainer.models.logits import LogitTransform
from muster.trainer.train.origin import RunOrigin, fresh_origin
from muster.trainer.train.second_model import LoadedSecond, find_second_models
from muster.trainer.train.tasks.choice import objective_of
from muster.trainer.train.tasks.objective import LossTotals, means
from muster.words.base import InvalidDocument, parse
from muster.words.job import Keep

SHAPE = Architecture(dim=24, layers=1, heads=2, kv_heads=2, ffn_dim=32, vocab_size=260, max_positions=64)
LARGER = SHAPE.model_copy(update={"dim": 32, "layers": 2, "tied_head": True})
CPU = torch.device("cpu")
RANKS = RankPosition(rank=0, world=1, local_rank=0, local_world=1)


def config(teacher: dict[str, Any], **changes: Any) -> TrainingConfig:
    document = {
        "task": "pretrain",
        "model": {"architecture": SHAPE.model_dump(by_alias=True)},
        "distillation": {"teacher": teacher, "temperature": 2.0, "weight": 0.7},
        "data": {"train": [{"source": "/x", "format": "text"}], "sequenceLength": 32},
        "batch": {"tokensPerStep": 64, "microBatch": 2},
        "length": {"steps": 1},
    }
    return parse(TrainingConfig, document | changes)


def committed(folder: Path) -> dict[str, Any]:
    """Another job's commit to learn from, as a teacher."""
    definition = DecoderModel(LARGER)
    model = definition.build(torch.float32, "none")
    definition.fill(model, CPU, 9, True)
    about = replace(
        identity(folder.as_uri()),
        architecture=definition.describe(),
        config={"task": "pretrain"},
        tokenizer=load_tokenizer("bytes").describe(),
    )
    saving = CheckpointSaver(about, Keep(), {})
    try:
        saving.save(state(model, torch.optim.AdamW(model.parameters()), 5))
        assert outcomes(saving) == [(5, True, None)]
    finally:
        saving.close()
    return {"from": {"uri": folder.as_uri(), "step": "last"}}


def built(training: TrainingConfig) -> tuple[RunOrigin, LoadedSecond]:
    origin = fresh_origin(training)
    (found,) = find_second_models(training, origin).values()
    layout = sharding.plan(origin.model, training, RANKS, 1 << 34, CPU, (found.model.size(),))
    return origin, LoadedSecond.load(found, training, layout, CPU)


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.5), (3.0, 0.2), (2.0, 1.0)])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(scale=0.5, cap=3.0)])
@pytest.mark.parametrize("rows", [17, 23, 13])  # of the teacher's table, beside 17 of the student's
def test_the_loss_and_its_gradients_are_autograds_of_the_formula(
    temperature: float, share: float, transform: LogitTransform, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGIT_CHUNK_BYTES, "cpu", 2 * 4 * 17 * 3)  # three rows at a time
    torch.manual_seed(1)
    hidden, weight, bias = torch.randn(2, 5, 8), torch.randn(17, 8), torch.randn(17)
    labels = torch.randint(0, 13, (2, 5))
    labels[0, 1] = labels[1, 4] = -100
    teacher = TeacherPredictions(
        torch.randn(2, 5, 6), torch.randn(rows, 6), torch.randn(rows), LogitTransform(scale=2.0), temperature, share
    )
    parts = [each.requires_grad_() for each in (hidden, weight, bias)]
    found = cross_entropy(hidden, weight, labels, 0.0, teacher, bias, transform)
    gradients = torch.autograd.grad(found[0] * 1.5, parts)
    logits = transform.scale * (hidden @ weight.t() + bias)
    logits = logits if transform.cap is None else transform.cap * torch.tanh(logits / transform.cap)
    theirs = 2.0 * (teacher.hidden @ teacher.weight.t() + teacher.bias)[..., :17]
    q = F.pad(torch.softmax(theirs / temperature, -1), (0, max(0, 17 - rows)))
    counted = labels != -100
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    log_p = torch.log_softmax(logits / temperature, -1)
    kl = (torch.special.xlogy(q, q) - q * log_p).sum(-1)[counted].sum()
    expected = (1 - share) * ce + share * temperature**2 * kl
    torch.testing.assert_close(found, torch.stack((expected, ce, kl)), atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(expected * 1.5, parts), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def logits_of(model: Any, batch: TokenBatch) -> Tensor:
    found: Tensor = model(batch.tokens, batch.positions, batch.documents)
    return found


def test_a_batch_is_learnt_from_its_tokens_and_from_the_teacher(tmp_path: Path) -> None:
    training = config(committed(tmp_path / "teacher"))
    origin, taught = built(training)
    student = origin.model.build(torch.float32, "none")
    origin.model.fill(student, CPU, 3, True)
    sample = empty_sample(32)
    sample.tokens[:], sample.documents[:], sample.positions[:] = 7, 0, range(32)
    sample.tokens[:20] = range(40, 60)
    sample.labels[:] = -100
    sample.labels[5:19] = sample.tokens[6:20]
    batch = TokenBatch.of([sample, sample], unscored=1)
    objective = objective_of(training, {TEACHER: taught.model})
    losses = objective.loss(student, batch)
    totals = LossTotals(objective.names, CPU)
    totals.add(losses)
    values = means(objective.names, totals.vector().tolist()[2:])
    teacher = DecoderModel(LARGER).build(torch.float32, "none")
    DecoderModel(LARGER).fill(teacher, CPU, 9, True)
    with torch.no_grad():
        p, q = (torch.log_softmax(logits_of(m, batch)[0, 5:19] / 2.0, -1) for m in (student, teacher))
        kl = F.kl_div(p, q, log_target=True, reduction="sum") / 14
        ce = F.cross_entropy(logits_of(student, batch)[0, 5:19], batch.labels[0, 5:19])
    assert values == {"cross_entropy": pytest.approx(float(ce)), "teacher_kl": pytest.approx(float(kl), rel=1e-4)}
    mean = float(losses.sum.detach() / losses.count)
    assert mean == pytest.approx(float(0.3 * ce + 0.7 * 4.0 * kl), rel=1e-5)
    losses.sum.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in student.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in taught.model.module.parameters())
    taught.must_be(taught.state)
    with pytest.raises(UserError, match=r"has other weights than when the job began \(seal"):
        taught.must_be({"teacher": taught.described | {"seal": "0" * 64}})
    with pytest.raises(UserError, match="has other weights"):
        taught.must_be({})


def test_a_folder_teaches_and_its_files_are_held_to_their_checksums(tmp_path: Path) -> None:
    write_model(tmp_path / "student", "llama-3.1")
    write_model(tmp_path / "teacher", "qwen2.5", seed=4, num_hidden_layers=3)
    source = (tmp_path / "teacher").as_uri()
    training = config({"source": source}, model={"source": (tmp_path / "student").as_uri()})
    _, taught = built(training)
    assert set(taught.described) >= {"address", "revision", "files", "crc32"}
    taught.must_be(taught.state)
    name = next(iter(taught.described["crc32"]))
    with pytest.raises(UserError, match=f"the bytes of {name}"):
        taught.must_be({"teacher": taught.described | {"crc32": {name: "00000000"}}})
    size = model_facts(training).size
    (teacher,) = size.second
    assert teacher.parameters == sum(p.numel() for p in taught.model.module.parameters())


def test_a_teacher_that_can_not_teach_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", "llama-3.1")
    with pytest.raises(UserError, match=r"its tokenizer is not that of the model that learns .* let the teacher write"):
        built(config({"source": (tmp_path / "teacher").as_uri()}))  # the student reads bytes
    write_model(tmp_path / "student", "llama-3.1")
    edit_json(tmp_path / "teacher" / "config.json", max_position_embeddings=16, rope_parameters=None)
    with pytest.raises(UserError, match=r"has 16 positions, and data\.sequenceLength is 32"):
        built(config({"source": (tmp_path / "teacher").as_uri()}, model={"source": (tmp_path / "student").as_uri()}))
    with pytest.raises(UserError, match="was not resolved to a checkpoint folder"):
        built(config({"from": {"job": "teacher"}}))
    with pytest.raises(InvalidDocument, match="exactly one of source"):
        config({})
    with pytest.raises(InvalidDocument, match="in pretrain and sft; not with labelSmoothing"):
        config({"source": "file:///x"}, labelSmoothing=0.1)
    with pytest.raises(InvalidDocument, match="not with task orpo"):
        config({"source": "file:///x"}, task="orpo", data={"train": [{"source": "/x"}], "sequenceLength": 32})


def test_the_teacher_is_planned_for() -> None:
    training = config({"source": "file:///x"})
    student, teacher = decoder_size(SHAPE, None), decoder_size(LARGER, None)
    both = replace(student, second=(teacher,))
    alone, beside = (estimate(size, training, ModelLayout.of("ddp", 1), 1) for size in (student, both))
    assert beside.total - alone.total == beside.second_model >= 4 * teacher.parameters
    sharded = estimate(both, training, ModelLayout.of("fsdp", 8), 1)
    assert sharded.second_model > teacher.parameters / 8 * 4
    assert "second_model" in fitting.advice(both, training, beside, 1, 1, fitting.RankHost(1))


def test_commits_named_by_job_are_given_their_folders() -> None:
    training = config({"from": {"job": "teacher"}}, model={"from": {"job": "base"}})
    assert {path: origin.job for path, origin in commits_read(training).items()} == {
        "model.from": "base",
        "distillation.teacher.from": "teacher",
    }
    for path in commits_read(training):
        training = with_folder(training, path, f"file:///{path}")
    assert {path: origin.uri for path, origin in commits_read(training).items()} == {
        "model.from": "file:///model.from",
        "distillation.teacher.from": "file:///distillation.teacher.from",
    }
