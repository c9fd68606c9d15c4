"""The pure parts: learning rate, clipping, loss scale, best and early stopping, FLOPs, stopwatch, random states."""

import itertools
import json
import math
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.plan import flops
from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import PRESETS, Architecture
from muster.recipe.evaluation_config import EarlyStopping
from muster.recipe.optimizer_config import OptimizerConfig, Schedule
from muster.recipe.training import TrainingConfig
from muster.trainer.checkpoint import randomness
from muster.trainer.errors import UserError
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.train.best import BestMetric
from muster.trainer.train.evaluation import HeldOutResult
from muster.trainer.train.optimizer import LossScale, clip_factor, make_optimizer, squared_norm
from muster.trainer.train.schedule import learning_rate, total_steps
from muster.trainer.train.stopwatch import ACCOUNTS, PhaseStopwatch


def optimizer(name: str, **changes: float) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"lr": 1.0, "schedule": {"name": name, "warmup_steps": 4, **changes}})


def test_cosine() -> None:
    config = optimizer("cosine", min_ratio=0.2)
    rates = [learning_rate(config, step, 24) for step in (1, 2, 4, 14, 24)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 0.6, 0.2])


def test_linear() -> None:
    config = optimizer("linear", min_ratio=0.0)
    assert [learning_rate(config, step, 24) for step in (4, 14, 19, 24)] == pytest.approx([1.0, 0.5, 0.25, 0.0])


def test_wsd_is_constant_then_falls_over_the_last_fraction() -> None:
    config = optimizer("wsd", min_ratio=0.0, decay_fraction=0.5)
    assert [learning_rate(config, step, 24) for step in (4, 8, 12, 18, 24)] == pytest.approx([1, 1, 1, 0.5, 0])


def test_constant() -> None:
    assert [learning_rate(optimizer("constant"), step, 24) for step in (1, 4, 12, 24)] == [0.25, 1, 1, 1]


@given(
    name=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    warmup=st.integers(0, 30),
    steps=st.integers(1, 100),
    floor=st.floats(0, 1),
    fraction=st.floats(0.01, 1),
)
def test_every_rate_is_between_nothing_and_the_peak(
    name: str, warmup: int, steps: int, floor: float, fraction: float
) -> None:
    schedule = Schedule.model_validate(
        {"name": name, "warmup_steps": warmup, "min_ratio": floor, "decay_fraction": fraction}
    )
    config = OptimizerConfig(lr=0.01, schedule=schedule)
    rates = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 0.01 * (1 + 1e-9) for rate in rates)
    after = rates[warmup:]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(after))


def document(**length: int) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "x"}], "sequenceLength": 100},
            "batch": {"tokensPerStep": 800},
            "length": length,
        }
    )


def test_length_in_whole_steps() -> None:
    assert total_steps(document(steps=7), 1000) == 7
    assert total_steps(document(tokens=801), 1000) == 2
    assert total_steps(document(epochs=3), 9) == 4  # 27 samples in steps of 8


def test_norms_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.LayerNorm(3, bias=False))
    groups = make_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in groups] == [
        (0.3, [(3, 3)]),
        (0.0, [(3,)]),
    ]


def test_the_update_is_torchs_fused_one() -> None:
    def weights() -> list[torch.nn.Parameter]:
        torch.manual_seed(4)
        return [
            torch.nn.Parameter(torch.randn(5, 3)),
            torch.nn.Parameter(torch.randn(7)),
            torch.nn.Parameter(torch.ones(2)),
        ]

    ours, theirs = weights(), weights()
    config = OptimizerConfig(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    mine = make_optimizer(torch.nn.ParameterList(ours), config)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for _ in range(5):
        for one, other in zip(ours[:2], theirs[:2], strict=True):  # the third never has a gradient
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        mine.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for name, value in reference.state[other].items():
            assert torch.equal(mine.state[one][name], value)


def test_norm_and_clipping_are_torchs() -> None:
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    norm = math.sqrt(squared_norm(gradients).item())
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(parameters, 0.5).item())
    for gradient, parameter in zip(gradients, parameters, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient * clip_factor(norm, 0.5), parameter.grad)
    assert clip_factor(0.1, 0.5) == clip_factor(1e9, 0) == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_shows_what_is_not_finite(bad: float) -> None:
    assert not math.isfinite(squared_norm([torch.ones(3), torch.tensor([1.0, bad])]).item())


def test_loss_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(enabled=True, value=1024.0)
    assert not scale.accepts(float("inf"))
    assert scale.value == 512.0
    assert all(scale.accepts(1.0) for _ in range(LossScale.GROW_AFTER))
    assert scale.value == 1024.0
    other = LossScale(enabled=True)
    other.restore(json.loads(json.dumps(scale.state())))
    assert other == scale
    while not scale.exhausted:
        assert not scale.accepts(float("nan"))


def test_no_loss_scale_outside_fp16() -> None:
    scale = LossScale(enabled=False)
    assert scale.accepts(float("nan"))
    assert scale.value == 1.0


def test_early_stopping_counts_evaluations_that_do_not_improve() -> None:
    best = BestMetric(EarlyStopping(patience=2, min_delta=0.1))
    judged = [best.judge(HeldOutResult(loss, {}, False), n) for n, loss in enumerate([3.0, 2.0, 1.95, 1.7, 1.65, 1.8])]
    assert judged == [True, True, False, True, False, False]
    assert best.stop
    assert (best.value, best.step) == (1.7, 3)
    other = BestMetric(EarlyStopping(patience=2, min_delta=0.1))
    other.restore(json.loads(json.dumps(best.state())))
    assert other == best


def test_without_a_rule_nothing_stops() -> None:
    best = BestMetric(None)
    assert [best.judge(HeldOutResult(2.0, {}, False), step) for step in range(9)] == [True] + [False] * 8
    assert not best.stop


def test_any_metric_may_decide_which_evaluation_is_best() -> None:
    best = BestMetric(EarlyStopping(patience=2), "chat/rewards/accuracies", "higher")
    found = [HeldOutResult(1.0, {"chat/rewards/accuracies": value}, False) for value in (0.5, 0.7, 0.6, 0.7)]
    assert [best.judge(each, step) for step, each in enumerate(found)] == [True, True, False, False]
    assert best.stop
    other = BestMetric(None, "chat/rewards/accuracies", "higher")
    other.restore(json.loads(json.dumps(best.state())))
    assert (other.value, other.step, other.without_improvement) == (0.7, 1, 2)
    by_loss = BestMetric(None)
    by_loss.restore(best.state())
    assert by_loss == BestMetric(None), "an accuracy of 0.7 is no loss to beat"
    by_loss.restore({"loss": 2.5, "step": 4, "withoutImprovement": 1})  # of a release that knew the loss alone
    assert (by_loss.value, by_loss.step, by_loss.without_improvement) == (2.5, 4, 1)
    with pytest.raises(UserError, match=r"could not measure it; it measured loss, perplexity"):
        best.judge(HeldOutResult(1.0, {"perplexity": 2.0}, False), 5)


def test_flops_of_a_known_model() -> None:
    """Llama-3.1-8B at 8k: 6 x 7.5 G weights in products + 12 x 32 x 4096 x 8192."""
    expected = 6 * (PRESETS["llama-8b"].parameters - 128_256 * 4096) + 12 * 32 * 4096 * 8192
    assert flops.per_token(DecoderModel(PRESETS["llama-8b"]).size(), 8192) == expected


def test_a_tied_table_is_multiplied_once() -> None:
    tied = Architecture(dim=8, layers=1, heads=2, kv_heads=2, ffn_dim=8, vocab_size=10, max_positions=8, tied_head=True)
    untied = tied.model_copy(update={"tied_head": False})
    assert flops.per_token(DecoderModel(tied).size(), 8) == flops.per_token(DecoderModel(untied).size(), 8)


def test_repeated_and_frozen_work() -> None:
    """Two per weight forward, four backward; two more where it is repeated, two fewer where it is frozen."""
    model = PRESETS["llama-8b"]
    weights, attention = model.parameters - 128_256 * 4096, 32 * 4096 * 8192
    whole = DecoderModel(model).size()
    assert flops.per_token(whole, 8192, repeated=1.0) == 8 * weights + 16 * attention
    adapter = Adapter(rank=16, targets=("q_proj", "v_proj", "down_proj"))
    own = 32 * 16 * (2 * 4096 + (4096 + 1024) + (14_336 + 4096))
    assert adapter.parameters(model) == own
    beside = DecoderModel(model, adapter).size()
    assert flops.per_token(beside, 8192) == 4 * weights + 6 * own + 12 * attention
    assert flops.per_token(beside, 8192, 1.0) == 6 * weights + 8 * own + 16 * attention
    assert flops.hardware_share(whole, 8192, "none") == 1.0
    assert flops.hardware_share(whole, 8192, "selective") == pytest.approx(7 / 6)
    assert flops.hardware_share(whole, 8192, "full") == pytest.approx(4 / 3)
    assert flops.hardware_share(beside, 8192, "full") > 4 / 3


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
        ("Something New", "bf16", None),
    ],
)
def test_peaks(name: str, precision: str, expected: float | None) -> None:
    assert flops.peak(name, precision) == expected  # type: ignore[arg-type]


def test_utilisation() -> None:
    assert flops.utilisation(1e9, 1000.0, 1e12, 2) == 0.5
    assert flops.utilisation(1e9, 1000.0, None, 2) is None


@given(st.lists(st.tuples(st.sampled_from(ACCOUNTS), st.floats(0, 1000)), max_size=30))
def test_every_second_is_in_one_account(spans: list[tuple[str, float]]) -> None:
    clock = [100.0]
    watch = PhaseStopwatch(started_at=50.0, now=lambda: clock[0], epoch=lambda: 53.0)  # three seconds before we looked
    expected = dict.fromkeys(ACCOUNTS, 0.0) | {"init": 3.0}
    account = "init"
    for following, seconds in spans:
        clock[0] += seconds
        expected[account] += seconds
        watch.switch(following)
        account = following
    found = watch.seconds()
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(3.0 + clock[0] - 100.0)


def test_random_states_come_back_through_json() -> None:
    randomness.seed(5, 1)
    random.random()
    torch.rand(3)
    random.gauss(0, 1)
    saved = json.loads(json.dumps(randomness.state()))
    expected = (random.random(), random.gauss(0, 1), torch.rand(4).tolist(), numpy.random.rand(3).tolist())
    randomness.seed(6, 2)
    randomness.restore(saved)
    assert (random.random(), random.gauss(0, 1), torch.rand(4).tolist(), numpy.random.rand(3).tolist()) == expected


def test_other_keys_give_other_random_numbers() -> None:
    randomness.seed(5, 0)
    first = torch.rand(3).tolist()
    randomness.seed(5, 1)
    assert torch.rand(3).tolist() != first


@pytest.mark.parametrize(
    ("name", "warmup", "cycles"),
    [
        ("inverse_sqrt", 10, 1),
        ("inverse_sqrt", 0, 1),
        ("cosine_with_restarts", 10, 1),
        ("cosine_with_restarts", 5, 4),
        ("cosine_with_restarts", 0, 3),
    ],
)
def test_schedules_are_those_of_transformers(name: str, warmup: int, cycles: int) -> None:
    from transformers import get_scheduler

    config = OptimizerConfig(
        lr=0.5,
        schedule=Schedule.model_validate({"name": name, "warmupSteps": warmup, "minRatio": 0.0, "cycles": cycles}),
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    more = {"num_cycles": cycles} if name == "cosine_with_restarts" else {}
    steps = None if name == "inverse_sqrt" else 60
    theirs = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=more)
    for step in range(1, 61):
        optimizer.step()
        theirs.step()  # of which the first step is number 0
        assert learning_rate(config, step, 60) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step


def test_a_decay_by_the_root_stops_at_the_smallest_share_and_cycles_belong_to_restarts() -> None:
    config = OptimizerConfig(lr=1.0, schedule=Schedule(name="inverse_sqrt", warmup_steps=2, min_ratio=0.1))
    assert learning_rate(config, 100, 10_000) == pytest.approx(math.sqrt(2 / 100))
    assert learning_rate(config, 5_000, 10_000) == 0.1
    with pytest.raises(ValueError, match="cycles is for name: cosine_with_restarts, not cosine"):
        Schedule(name="cosine", cycles=2)
