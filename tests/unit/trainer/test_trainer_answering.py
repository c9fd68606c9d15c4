"""Answers at evaluations: each prompt's is what the model would say alone, scored once on however many ranks."""

import copy
import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from muster.local import seccomp
from muster.recipe.architecture import Architecture
from muster.recipe.verifiers import Verifier, score_metrics
from muster.trainer.checkpoint import randomness
from muster.trainer.config import DataParallel
from muster.trainer.data import load_tokenizer
from muster.trainer.data.prompts import ModelPrompt
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.generation import SamplingSettings, generate
from muster.trainer.train.answering import AnsweredSet, AnswerEvaluator, AnswerScoring
from muster.trainer.train.writing import TokenWriter, WrittenTokens
from muster.words.base import parse

SHAPE = Architecture(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=264, max_positions=64)
CPU = torch.device("cpu")
TOKENIZER = load_tokenizer("bytes")
ENDS = frozenset({256, *range(0, 256, 20)})  # so many that some answers end
WORDS = ["hello", "a", "what is said before is longer", "12 + 30 = ", "?", "the last of them", "b"]
TOKENS = 10


def model() -> tuple[DecoderModel, Any]:
    definition = DecoderModel(SHAPE, None)
    module = definition.build(torch.float32, "none")
    definition.fill(module, CPU, 3, values=True)
    for parameter in module.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(parameter.shape[0]))
    return definition, module.train()


def alone(module: Any) -> list[list[int]]:
    """What the model says to each prompt."""
    module.eval()
    said = [
        list(generate(module, list(words.encode()), ENDS, 260, SamplingSettings(TOKENS), 64, CPU)) for words in WORDS
    ]
    module.train()
    return said


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_each_prompt_is_answered_and_scored_once(ranks: int) -> None:
    definition, module = model()
    tokens = alone(module)
    said = [TOKENIZER.decode(each) for each in tokens]
    # The references of all but two are right.
    prompts: Any = [ModelPrompt(list(w.encode()), {"answer": f" {s} "}) for w, s in zip(WORDS, said, strict=True)]
    prompts[2], prompts[4] = (prompts[n]._replace(columns={"answer": "something else"}) for n in (2, 4))
    verifiers = [
        parse(Verifier, {"exactMatch": {}}),
        parse(Verifier, {"regex": {"pattern": "[a-z]"}, "name": "letters", "weight": 0.5}),
    ]
    vectors: list[Tensor] = []
    values: list[dict[str, float]] = []
    for adding in (True, False):
        for rank in range(ranks):

            def total(vector: Tensor, adding: bool = adding) -> list[float]:
                if adding:
                    vectors.append(vector)
                return [float(value) for value in sum(vectors)]  # type: ignore[union-attr]

            answered = AnsweredSet("held", prompts, 100, TOKENS, AnswerScoring(verifiers, TOKENIZER))
            writer = TokenWriter(module, definition, TOKENIZER, ENDS, CPU)
            evaluator = AnswerEvaluator([answered], module, writer, DataParallel(ranks, (rank,)), 80, CPU)
            values.append(evaluator.run(total))
    exact = (len(WORDS) - 2) / len(WORDS)
    letters = sum(any("a" <= letter <= "z" for letter in each) for each in said) / len(WORDS)
    lengths = [len(each) for each in tokens]
    assert values[-1] == pytest.approx(
        {
            "held/exact_match": exact,
            "held/letters": letters,
            "held/score": exact + 0.5 * letters,
            "held/finished": sum(length < TOKENS for length in lengths) / len(WORDS),
            "held/answer_tokens": sum(lengths) / len(WORDS),
        }
    )
    assert 0 < values[-1]["held/finished"] < 1, "else the test says little"


@pytest.mark.skipif(not seccomp.has_filter(), reason=f"no filter of system calls for {sys.platform}")
def test_programs_that_hang_or_eat_memory_are_told_of() -> None:
    programs = ["while True: pass", "x = bytearray(1 << 40)", "x = 4", "import time\ntime.sleep(1_000)", "x = 5"]
    said: list[str] = []
    limits = {"unitTests": {"timeoutSeconds": 0.5, "memoryMegabytes": 128}, "name": "code"}
    verifiers = [parse(Verifier, {"exactMatch": {"column": "tests"}}), parse(Verifier, limits)]
    scoring = AnswerScoring(verifiers, TOKENIZER, said.append)
    prompts = [ModelPrompt([97], {"tests": "assert x == 4"})] * len(programs)
    written = [WrittenTokens(list(program.encode()), None) for program in programs]
    scores = scoring.scores(prompts, written)
    assert scores.values[:, 1].tolist() == [0, 0, 1, 0, 0]
    names = list(score_metrics(verifiers))[-2:]
    assert dict(zip(names, scores.limits.T.tolist(), strict=True)) == {
        "code/out_of_time": [1, 0, 0, 1, 0],
        "code/out_of_memory": [0, 1, 0, 0, 0],
    }
    time, memory = said
    assert time.startswith(
        "verifier code: warning: 2 of the 5 programs that this rank ran were stopped at timeoutSeconds 0.5 (2 of the "
        "last 5), and score 0; one of them: 'while True: pass'."
    )
    assert "1 of the 5 programs that this rank ran were stopped at memoryMegabytes 128" in memory
    assert "raise memoryMegabytes. Metric code/out_of_memory has the share" in memory
    scoring.scores(prompts[:1], written[:1])
    assert len(said) == 2, "three are no twice as many as two"
    scoring.scores(prompts[:1], written[:1])
    assert said[2].startswith("verifier code: warning: 4 of the 7 programs")


def test_training_goes_on_as_if_nobody_had_asked() -> None:
    definition, module = model()
    weights, state = copy.deepcopy(module.state_dict()), (randomness.state(), random.getstate())
    prompts: Any = [ModelPrompt([97, 98], {"answer": "x"})]
    answered = AnsweredSet("held", prompts, 1, 4, AnswerScoring([parse(Verifier, {"exactMatch": {}})], TOKENIZER))
    writer = TokenWriter(module, definition, TOKENIZER, ENDS, CPU)
    AnswerEvaluator([answered], module, writer, DataParallel(1, (0,)), 80, CPU).run(lambda vector: vector.tolist())
    assert (randomness.state(), random.getstate()) == state
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert module.training
