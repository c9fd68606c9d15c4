"""Samples at evaluations: what the model would say anyhow, kept with the job, and no trace in training."""

import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.recipe.architecture import ASSISTANT_MARK, END_OF_TURN, USER_MARK, Architecture
from muster.recipe.evaluation_config import Generation
from muster.recipe.training import TrainingConfig
from muster.trainer.checkpoint import randomness
from muster.trainer.config import RankPosition
from muster.trainer.data import load_tokenizer
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.generation import SamplingSettings, generate
from muster.trainer.train.samples import SampleMaker
from muster.words.base import InvalidDocument, parse
from muster.words.samples import Samples, samples_key, step_of_samples

SHAPE = Architecture(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=264, max_positions=64)
CPU = torch.device("cpu")
PROMPTS = ("hello", "a", "what is said before is longer")


def maker(folder: Path, task: str, max_tokens: int = 12) -> tuple[SampleMaker, Any]:
    definition = DecoderModel(SHAPE, None)
    module = definition.build(torch.float32, "none")
    definition.fill(module, CPU, 3, values=True)
    for parameter in module.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(parameter.shape[0]))
    asked = Generation(prompts=PROMPTS, max_tokens=max_tokens)
    training = SimpleNamespace(task=task, evaluation=SimpleNamespace(generate=asked))
    run: Any = SimpleNamespace(training=training, folder=folder.as_uri(), attempt=2)
    ranks = RankPosition(rank=0, world=1, local_rank=0, local_world=1)
    return SampleMaker(run, ranks, definition, module.train(), load_tokenizer("bytes"), CPU), module


@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_each_prompt_is_followed_by_what_the_model_would_say_alone(tmp_path: Path, task: str) -> None:
    made, module = maker(tmp_path, task)
    samples = made.make(40)
    made.close()
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        ids = list(prompt.encode())
        ids = [USER_MARK, *ids, END_OF_TURN, ASSISTANT_MARK] if task == "sft" else ids
        ends = frozenset({256, END_OF_TURN} if task == "sft" else {256})
        expected = list(generate(module.eval(), ids, ends, 260, SamplingSettings(12), 64, CPU))
        assert sample.prompt == prompt
        assert sample.text == load_tokenizer("bytes").decode(expected)
        assert sample.finished == (len(expected) < 12)
    kept = Samples.model_validate_json((tmp_path / samples_key(40)).read_text())
    assert (kept.step, kept.attempt, kept.samples) == (40, 2, samples)
    assert step_of_samples(samples_key(40)) == 40
    assert step_of_samples("samples/notes.txt") is None


def test_training_goes_on_as_if_nobody_had_asked(tmp_path: Path) -> None:
    made, module = maker(tmp_path, "pretrain")
    weights, state = copy.deepcopy(module.state_dict()), (randomness.state(), random.getstate())
    assert made.make(1) == made.make(1)
    made.close()
    assert (randomness.state(), random.getstate()) == state
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_store_that_fails_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    made, _ = maker(tmp_path, "pretrain", max_tokens=2)
    assert len(made.make(8)) == len(PROMPTS)
    made.close()
    assert "the samples of step 8 could not be kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"compile": True}}, "parallel.compile would compile for each length"),
        ({"task": "reward", "model": {"from": {"job": "a"}}}, "a model of task reward scores texts and writes none"),
        ({"evaluation": {"every": 1, "holdout": 0.1, "generate": {"prompts": []}}}, "at least 1 item"),
    ],
)
def test_what_can_not_write_is_refused(changes: dict[str, Any], words: str) -> None:
    document = {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": "a"}]},
        "batch": {"tokensPerStep": 512},
        "length": {"steps": 1},
        "evaluation": {"every": 1, "holdout": 0.1, "generate": {"prompts": ["hi"]}},
    }
    with pytest.raises(InvalidDocument, match=words):
        parse(TrainingConfig, {**document, **changes})
