"""Ranks that divide the tokens of their rows compute what one rank does. Here the ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.model_families import config_of
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers import AutoConfig

from muster.recipe.architecture import Architecture
from muster.trainer.errors import UserError
from muster.trainer.models import self_test
from muster.trainer.models.decoder import Decoder, Recompute, build
from muster.trainer.models.head import ByToken, Reduction
from muster.trainer.models.init import initialize
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.parallel.thread_group import ThreadGroup, thread_groups
from muster.trainer.parallel.token_split import TokenSplit

LENGTHS = (9, 12)  # of the documents of the first row; the second has one
PADDING = 3
LENGTH = sum(LENGTHS) + PADDING

Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def some_rows() -> Rows:
    """Tokens, positions, documents and labels of two rows."""
    tokens = torch.randint(0, 250, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.stack((torch.cat([torch.arange(n) for n in (*LENGTHS, PADDING)]), torch.arange(LENGTH)))
    numbers = torch.tensor([0] * LENGTHS[0] + [1] * LENGTHS[1] + [-1] * PADDING)
    documents = torch.stack((numbers, torch.zeros(LENGTH, dtype=torch.int64)))
    return tokens, positions, documents, torch.where(documents >= 0, tokens.roll(-1, 1), -100)


def decoder(kv_heads: int = 2, recompute: Recompute = "none", scores: ScoreHead | None = None) -> Decoder:
    shape = Architecture(dim=32, layers=2, heads=4, kv_heads=kv_heads, ffn_dim=64, vocab_size=260, max_positions=64)
    made = build(shape, recompute=recompute, device="cpu", scores=scores)
    initialize(made, shape, 3)
    return made


def on_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Return the answers of so many ranks."""

    def rank(group: ThreadGroup) -> Any:
        with group.leaving_none_waiting():
            return work(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, thread_groups(size)))


def learnt(model: Decoder, rows: Rows, reduction: Reduction) -> tuple[Tensor, list[Tensor]]:
    """The losses of the rows, and the gradients by weighted losses."""
    tokens, positions, documents, labels = rows
    if model.scores is not None:
        out = model(tokens, positions, documents)
    else:
        out = model(tokens, positions, documents, labels, 0.0, reduction)
    (out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()  # type: ignore[no-untyped-call]
    return out.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def must_agree(size: int, by_heads: bool, made: Callable[[], Decoder], reduction: Reduction = "sum") -> None:
    alone, gradients = learnt(made(), some_rows(), reduction)

    def work(group: ThreadGroup) -> tuple[Tensor, list[Tensor]]:
        model = made()
        model.split = TokenSplit(group, by_heads)
        return learnt(model, some_rows(), reduction)

    ranks = on_ranks(size, work)
    for losses, _ in ranks:
        torch.testing.assert_close(losses, alone, rtol=1e-6, atol=1e-6)
    for gradient, *parts in zip(gradients, *(each for _, each in ranks), strict=True):
        assert (torch.stack(parts).sum(0) - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max()))


@pytest.mark.parametrize(("size", "by_heads"), [(2, True), (4, True), (2, False), (3, False), (4, False)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_losses_and_the_sum_of_gradients_are_those_of_one_rank(size: int, by_heads: bool, kv_heads: int) -> None:
    must_agree(size, by_heads, lambda: decoder(kv_heads), ByToken())


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("by_heads", [True, False])
def test_layers_that_are_computed_again_meet_again(recompute: Recompute, by_heads: bool) -> None:
    must_agree(2, by_heads, lambda: decoder(recompute=recompute))


def test_scores_of_documents_are_those_of_whole_rows() -> None:
    must_agree(2, True, lambda: decoder(scores=ScoreHead(1, pad=0)))


@pytest.mark.parametrize(("size", "by_heads"), [(2, True), (4, True), (3, False)])
def test_a_changed_document_changes_no_bit_of_another(size: int, by_heads: bool) -> None:
    tokens, positions, documents, labels = some_rows()
    changed = torch.where(documents == 0, (tokens + 7) % 250, tokens)
    changed[1] = tokens[1]  # whose only document has the same number

    def work(group: ThreadGroup) -> list[Tensor]:
        model = decoder()
        model.split = TokenSplit(group, by_heads)
        with torch.no_grad():
            return [model(row, positions, documents, labels, 0.0, ByToken()) for row in (tokens, changed)]

    for before, after in on_ranks(size, work):
        others = documents != 0
        others[1] = True
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[~others], after[~others])


def test_logits_without_labels_are_those_of_whole_rows_on_every_rank() -> None:
    tokens, positions, documents, _ = some_rows()
    model = decoder()
    with torch.no_grad():
        alone = model(tokens, positions, documents)
        model.split = TokenSplit(thread_groups(2)[0])
        assert torch.equal(model(tokens, positions, documents), alone)  # and nobody was waited for


def test_the_mask_of_own_queries_sees_what_whole_rows_do() -> None:
    documents = some_rows()[2]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    whole = create_block_mask(visible, B=2, H=None, Q_LEN=LENGTH, KV_LEN=LENGTH, device="cpu")
    dense = create_mask(visible, 2, 1, LENGTH, LENGTH, device="cpu")
    split = TokenSplit(thread_groups(3)[1], by_heads=False)
    query = torch.empty(2, 4, LENGTH // 3, 8)
    own = split._own_rows(whole, LENGTH, query)
    assert torch.equal(create_mask(own.mask_mod, 2, 1, LENGTH // 3, LENGTH, device="cpu"), dense[:, :, 1::3])
    assert torch.equal(split._own_rows(dense, LENGTH, query), dense[:, :, 1::3])
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    assert torch.equal(split._own_rows(None, LENGTH, query), causal[:, :, 1::3])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_has_as_much_of_the_documents_work(size: int) -> None:
    """Whichever documents fill a row: the length of conversations is about log-normal."""
    dice = np.random.default_rng(0)
    for _ in range(50):
        lengths = np.clip(dice.lognormal(6.0, 1.2, 200).astype(int), 2, 8192)
        lengths = lengths[np.cumsum(lengths) <= 8192]
        seen = np.concatenate([np.arange(1, length + 1) for length in lengths])  # keys that each query sees
        work = [int(seen[rank::size].sum()) for rank in range(size)]
        assert max(work) / (sum(work) / size) <= 1.1


@pytest.mark.parametrize(
    ("family", "by_heads"),
    [("llama-3.1", True), ("mistral", True), ("gemma-3", True), ("qwen3-moe", True), ("gpt-oss", False)],
)
def test_a_class_of_transformers_is_tried_before_its_tokens_are_divided(family: str, by_heads: bool) -> None:
    """gpt-oss has a weight of its own for each head in its attention, so its heads can't be given away."""
    config = config_of(family)
    assert self_test.divides_heads(config, self_test.examine(config), by_heads=True) is by_heads


def test_a_class_that_has_an_attention_of_its_own_is_refused_by_name() -> None:
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=2, n_head=4, vocab_size=288)
    with pytest.raises(UserError, match="the layers of a bloom can't have the tokens of their rows divided"):
        self_test.divides_heads(config, self_test.PackingFindings(packs=False), by_heads=True)
