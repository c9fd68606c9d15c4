"""AdamW in eight bits against its references, rounding at random, the mean of weights, and state in host memory."""

from typing import Any

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.plan.optimizer_state import UPDATE_VALUES, block_of
from muster.recipe.optimizer_config import OptimizerConfig
from muster.trainer.parallel.shards import local
from muster.trainer.train import adamw, eight_bit
from muster.trainer.train.adamw import ShardAdamW
from muster.trainer.train.optimizer import make_optimizer, squared_norm
from muster.trainer.train.rounding import RoundingNoise, round_stochastically

CONFIG: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((48, 512), (512, 256), (40, 256), (7,))


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(4)
    return nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def steps(model: nn.ParameterList, *optimizers: torch.optim.Optimizer, count: int = 5) -> None:
    """Steps with gradients of very different sizes."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        for parameter in model:
            sizes = 10.0 ** torch.randint(-4, 1, parameter.shape, generator=generator)
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * sizes).to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()


def ours(model: nn.ParameterList, seed: int = 0, **changes: Any) -> ShardAdamW:
    return make_optimizer(model, OptimizerConfig(**CONFIG, **changes), seed)


def by_libraries(kind: Any, model: nn.ParameterList) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in model if p.ndim > 1]}, {"params": [p for p in model if p.ndim < 2]}]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    made: torch.optim.Optimizer = kind(groups, **CONFIG)
    return made


def test_eight_bits_are_those_of_bitsandbytes_to_the_bit() -> None:
    mine, theirs = weights(*SHAPES), weights(*SHAPES)
    optimizer, reference = ours(mine, name="adamw8bit"), by_libraries(bitsandbytes.optim.AdamW8bit, theirs)
    steps(mine, optimizer)
    steps(theirs, reference)
    for one, other in list(zip(mine, theirs, strict=True))[:3]:
        assert torch.equal(one, other)
        for own, name in (("exp_avg", "state1"), ("exp_avg_sq", "state2")):
            assert optimizer.state[one][own].dtype == torch.uint8
            assert torch.equal(optimizer.state[one][own], reference.state[other][name])
        scales = optimizer.state[one]["exp_avg_absmax"]
        assert torch.equal(scales.flatten(), reference.state[other]["absmax1"])
    torch.testing.assert_close(mine[3], theirs[3])  # a vector keeps fp32, by torch's kernel


def test_the_kernel_of_one_pass_does_what_the_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rows = weights((40, 256)), weights((40, 256))
    one, other = ours(whole, name="adamw8bit"), ours(rows, name="adamw8bit")
    kernel = eight_bit.update_in_one_pass
    steps(rows, other)
    monkeypatch.setattr(adamw, "_update", lambda w, g, state, step, group, noise: kernel(w, g, state, step, group))
    steps(whole, one)
    assert eight_bit.has_kernel(one.state[whole[0]])
    assert torch.equal(whole[0], rows[0])
    assert all(torch.equal(value, other.state[rows[0]][name]) for name, value in one.state[whole[0]].items())


@pytest.mark.parametrize(
    ("shape", "block"),
    [((64, 896), 128), ((64, 64), 64), ((4, 1024), 256), ((3, 1024), 0), ((8192,), 0), ((99, 96), 0)],
)
def test_blocks_divide_a_row(shape: tuple[int, ...], block: int) -> None:
    assert block_of(shape) == block
    model = weights(shape)
    optimizer = ours(model, name="adamw8bit")
    steps(model, optimizer, count=1)
    state = optimizer.state[model[0]]
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()} == optimizer.state_layout(
        model[0]
    )
    assert (state["exp_avg"].dtype == torch.uint8) == bool(block)


def shard_of(rank: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Rank's rows of a weight of 97 rows over two ranks, and of its state, after some steps."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        # A name of its own, or torch takes the mesh of the rank before, which it remembers, for the same.
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"rank{rank}-{dtype}",))
        (whole,) = weights((97, 128), dtype=dtype)
        model = nn.ParameterList([nn.Parameter(distribute_tensor(whole.data, mesh, [Shard(0)], src_data_rank=None))])
        optimizer = ours(model, name="adamw8bit", ema={"decay": 0.9})
        for gradient in gradients_of(dtype):
            model[0].grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
            optimizer.step()
        kept = optimizer.state[model[0]]
        assert {n: (t.dtype, tuple(t.shape)) for n, t in kept.items()} == optimizer.state_layout(model[0])
        return local(model[0].detach()), {name: local(tensor) for name, tensor in kept.items()}
    finally:
        dist.destroy_process_group()


def gradients_of(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn((97, 128), generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_update_their_rows_as_one_updates_all(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, and however many rows are taken at a time; so commits of some ranks go on in any number of them."""
    whole = weights((97, 128), dtype=dtype)
    optimizer = ours(whole, name="adamw8bit", ema={"decay": 0.9})
    monkeypatch.setattr(adamw, "UPDATE_VALUES", 128 * 10)
    for gradient in gradients_of(dtype):
        whole[0].grad = gradient
        optimizer.step()
    parts = [shard_of(rank, dtype) for rank in range(2)]
    assert torch.equal(whole[0], torch.cat([weight for weight, _ in parts]))
    for name, value in optimizer.state[whole[0]].items():
        if name != "step":
            assert torch.equal(value, torch.cat([state[name] for _, state in parts])), name


def rounded(values: Tensor, key: str = "k") -> Tensor:
    return round_stochastically(values.clone(), RoundingNoise(torch.device("cpu")).of(key, tuple(values.shape)))


def test_rounding_at_random_is_right_on_the_average() -> None:
    """The mean of 2^20 roundings is within five standard errors of the value, which rounding to nearest misses."""
    low, high = 1.0, 1.0 + 2.0**-7  # neighbours in bf16
    for part in (0.1, 0.5, 0.93):
        value = torch.tensor(low + part * (high - low))
        found = rounded(value.expand(2**20).contiguous()).double()
        assert set(found.unique().tolist()) == {low, high}
        error = (part * (1 - part)) ** 0.5 * (high - low) / 2**10
        assert (
            abs(found.mean() - value.double()) < 5 * error < abs(value.bfloat16().double() - value.double())
            or part == 0.5
        )
    assert torch.equal(rounded(-torch.full((99,), 1.004)), -rounded(torch.full((99,), 1.004)))


def test_rounding_leaves_what_bf16_can_hold_and_repeats_itself() -> None:
    values = torch.randn(5000).bfloat16()
    assert torch.equal(rounded(values.float()), values)
    other = torch.randn(5000)
    assert torch.equal(rounded(other), rounded(other))
    assert not torch.equal(rounded(other), rounded(other, "another key"))


def test_weights_in_bf16_learn_from_updates_that_rounding_to_nearest_loses() -> None:
    """1,000 steps of a thousandth of the distance between neighbours: together one distance."""
    model = nn.ParameterList([torch.ones(64, 64).bfloat16()])
    optimizer = make_optimizer(model, OptimizerConfig(lr=2.0**-17, weight_decay=0.0), 3)
    for _ in range(1000):
        model[0].grad = torch.ones_like(model[0])
        optimizer.step()
    moved = 1.0 - model[0].detach().double().mean().item()
    assert moved == pytest.approx(1000 * 2.0**-17, rel=0.02)
    assert optimizer.state[model[0]]["exp_avg"].dtype == torch.float32


def test_the_mean_of_the_weights_is_torchs() -> None:
    model, plain = weights(*SHAPES), weights(*SHAPES)
    optimizer, reference = ours(model, ema={"decay": 0.6}), ours(plain)

    def mix(mean: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        return mean.lerp(weight, 1 - min(0.6, (1 + int(number)) / (10 + int(number))))

    averaged = torch.optim.swa_utils.AveragedModel(plain, avg_fn=mix)
    averaged.update_parameters(plain)  # the first call copies
    averaged.n_averaged.fill_(1)
    for parameter, other in zip(model, plain, strict=True):
        parameter.grad = other.grad = torch.ones_like(other)
    for _ in range(30):
        optimizer.step()
        reference.step()
        averaged.update_parameters(plain)
    for parameter, mean in zip(model, averaged.module.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["ema"], mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_state_in_host_memory_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "UPDATE_VALUES", 512 * 10)
    here, there = weights(*SHAPES), weights(*SHAPES)
    near, far = ours(here, name=name, ema={}), ours(there, name=name, ema={}, offload=True)
    steps(here, near)
    steps(there, far)
    assert UPDATE_VALUES > 512 * 10
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one, other)
        for kind, value in near.state[one].items():
            assert torch.equal(far.state[other][kind], value), kind
            assert far.state[other][kind].device.type == "cpu"


def test_the_norm_of_gradients_in_bf16_is_not_rounded_to_bf16() -> None:
    gradients = [torch.full((1000,), 1.0).bfloat16(), torch.full((3,), 0.5).bfloat16()]
    assert squared_norm(gradients).item() == pytest.approx(1000.75, rel=1e-6)
