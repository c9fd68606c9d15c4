"""Generated tokens are the same with a cache and without one, and for transformers' models those of its `generate`."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.model_families import write_model
from torch import nn

from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import Architecture
from muster.storage.model_folder import open_folder
from muster.trainer.models import transformers_model
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.files import open_files
from muster.trainer.models.generation import SamplingSettings, TokenContinuation, choose, generate

CPU = torch.device("cpu")
SHAPE = Architecture(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=64, max_positions=48)
PROMPTS = ([5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8])


def decoder(adapter: Adapter | None = None) -> nn.Module:
    definition = DecoderModel(SHAPE, adapter)
    model = definition.build(torch.float32, "none")
    definition.fill(model, CPU, 3, values=True)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh weights say the same after every prompt
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(parameter.shape[0]))
    return model.eval()


def followed(model: nn.Module, prompts: Sequence[Sequence[int]], count: int, cached: bool) -> list[list[int]]:
    """The likeliest `count` tokens after each prompt, all in one batch."""
    rows = TokenContinuation(model, prompts, pad=0, positions_max=None, device=CPU, cached=cached)
    found: list[list[int]] = []
    with torch.no_grad():
        for _ in range(count):
            found.append(rows.next_logits().argmax(-1).tolist())
            rows.append(found[-1])
    return [list(row) for row in zip(*found, strict=True)]


@pytest.mark.parametrize("adapter", [None, Adapter(rank=4, targets=("q_proj", "v_proj"))])
def test_a_cache_changes_no_token_and_neither_does_a_batch(adapter: Adapter | None) -> None:
    model = decoder(adapter)
    alone = [followed(model, [prompt], 20, cached=False)[0] for prompt in PROMPTS]
    assert followed(model, PROMPTS, 20, cached=True) == alone
    assert followed(model, PROMPTS, 20, cached=False) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


def test_the_logits_with_a_cache_are_those_without() -> None:
    model = decoder()
    rows = [TokenContinuation(model, PROMPTS, 0, None, CPU, cached) for cached in (True, False)]
    with torch.no_grad():
        for token in (3, 11, 60, 2):
            with_cache, without = (each.next_logits() for each in rows)
            torch.testing.assert_close(with_cache, without, rtol=1e-5, atol=1e-5)
            for each in rows:
                each.append([token, token + 1, token + 2])


def test_behind_the_last_position_it_goes_on_from_the_last_half() -> None:
    model, sampling = decoder(), SamplingSettings(max_tokens=70)
    with_cache, without = (
        list(generate(model, [5, 9], frozenset(), 64, sampling, SHAPE.max_positions, CPU, cached))
        for cached in (True, False)
    )
    assert len(with_cache) == 70
    assert with_cache == without
    long = list(range(1, 61))  # a prompt longer than the model
    assert list(generate(model, long, frozenset(), 64, SamplingSettings(3), SHAPE.max_positions, CPU)) == list(
        generate(model, long[-24:], frozenset(), 64, SamplingSettings(3), SHAPE.max_positions, CPU)
    )


@pytest.mark.parametrize("family", ["llama-3.1", "qwen3", "gemma-2", "mixtral", "gpt-oss"])
def test_the_likeliest_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    theirs = write_model(tmp_path, family)
    definition = transformers_model.from_folder(open_folder(open_files(tmp_path.as_uri())), None)
    model = definition.build(torch.float32, "none")
    definition.fill(model, CPU, 0, values=True)
    model.eval()
    for prompt in ([40, 41, 42], list(range(60, 76))):
        made = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected = made[0, len(prompt) :].tolist()
        assert list(generate(model, prompt, frozenset(), 288, SamplingSettings(16), 256, CPU)) == expected
        end = expected[7]
        until_there = expected[: expected.index(end)]
        assert list(generate(model, prompt, frozenset({end}), 288, SamplingSettings(16), 256, CPU)) == until_there


def test_what_is_drawn_follows_seed_temperature_and_top_p() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])

    def drawn(count: int = 400, **given: float) -> list[int]:
        dice = torch.Generator().manual_seed(7)
        return [choose(logits, SamplingSettings(**given), dice) for _ in range(count)]  # type: ignore[arg-type]

    assert set(drawn()) == {0}
    assert drawn(temperature=1.0) == drawn(temperature=1.0)
    assert set(drawn(temperature=2.0)) == {0, 1, 2, 3, 4}
    chances = torch.softmax(logits, 0)
    shares = [drawn(4000, temperature=1.0).count(token) / 4000 for token in range(5)]
    assert shares == pytest.approx(chances.tolist(), abs=0.03)
    # The likeliest two have 0.87 together, the first alone 0.64.
    assert set(drawn(temperature=1.0, top_p=0.7)) == {0, 1}
    assert set(drawn(temperature=1.0, top_p=0.6)) == {0}
    model = decoder()
    texts = [
        tuple(generate(model, [5], frozenset(), 64, SamplingSettings(9, 1.0, 1.0, seed), 48, CPU)) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_only_tokens_of_the_tokenizer_are_chosen() -> None:
    tokens = list(generate(decoder(), [5], frozenset(), 10, SamplingSettings(30, temperature=5.0), 48, CPU))
    assert max(tokens) < 10
