"""AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) on this rank's shards, with its state in fp32 or in eight bits, on
the device or in the host's memory, for weights in fp32 or in bf16, and with a mean of the weights beside them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from muster.plan.optimizer_state import UPDATE_VALUES, block_of
from muster.recipe.optimizer_config import OptimizerConfig
from muster.trainer.models.nf4 import need_kernels
from muster.trainer.parallel.shards import alongside, local, local_part
from muster.trainer.train import eight_bit
from muster.trainer.train.eight_bit import MOMENTS
from muster.trainer.train.rounding import RoundingNoise, round_stochastically

StateLayout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # by name: dtype and global shape


class ShardAdamW(torch.optim.AdamW):
    """torch's AdamW, applied to this rank's shards themselves: the update is elementwise, so a DTensor's way through
    the dispatcher (milliseconds a step) buys nothing. State and its names are torch's.

    Weights in fp32 whose state is in fp32 on their device are updated by torch's fused kernel, all at once. All others
    are updated a few rows at a time, so that what is decoded, rounded or fetched from the host takes little memory.
    `seed` decides how weights in bf16 are rounded.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, seed: int = 0) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self._eight_bit, self._offload = config.name == "adamw8bit", config.offload
        self._ema = config.ema.decay if config.ema else None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._keys = {parameter: f"{seed}/{number}" for number, parameter in enumerate(parameters)}
        self._noise: RoundingNoise | None = None
        self._offsets: dict[nn.Parameter, tuple[int, ...]] = {}
        if self._eight_bit:
            need_kernels("optimizer.name adamw8bit")

    # torch's own of these two load the compiler, which takes half a second, to tell it to keep away.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.AdamW.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none, "a gradient of zeros would still take its memory"
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_layout(self, parameter: nn.Parameter) -> StateLayout:
        """Return the dtype and the shape of each tensor that is kept for a parameter, by name."""
        shape, block = tuple(parameter.shape), self._block(parameter)
        layout: StateLayout = {"step": (torch.float32, ())}
        for moment in MOMENTS:
            layout[moment] = (torch.uint8 if block else torch.float32, shape)
            if block:
                layout[f"{moment}_absmax"] = (torch.float32, (*shape[:-1], shape[-1] // block))
        if self._ema is not None:
            layout["ema"] = (torch.float32, shape)
        return layout

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first update, sharded as it is: moments are 0, the mean is the weight."""
        state: dict[str, Tensor] = {}
        host = torch.device("cpu")
        device, locked = (host, parameter.is_cuda) if self._offload else (parameter.device, False)
        for name, (dtype, shape) in self.state_layout(parameter).items():
            if name == "step":  # read by our own arithmetic on the host, or by the fused kernel where that is
                fused = parameter.dtype == torch.float32 and not self._block(parameter)
                state[name] = torch.zeros((), dtype=dtype, device=parameter.device if fused else host)
                continue
            state[name] = alongside(parameter, shape, dtype, device, locked)
            if name == "ema":
                local(state[name]).copy_(local(parameter.detach()))
            else:
                local(state[name]).zero_()
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "a closure is for optimizers that look again"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = self.new_state(parameter)
            torch._foreach_add_([self.state[p]["step"] for p in parameters], 1)
            apart = {p for p in parameters if self._offload or p.dtype != torch.float32 or self._block(p)}
            self._update_together([p for p in parameters if p not in apart], group)
            for parameter in [p for p in parameters if p in apart]:
                self._update_by_rows(parameter, group)
        if self._offload and torch.cuda.is_available():
            # The next save reads the host's memory without asking the device.
            torch.cuda.current_stream().synchronize()

    def _block(self, parameter: nn.Parameter) -> int:
        return block_of(parameter.shape) if self._eight_bit else 0

    def _update_together(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        states = [self.state[p] for p in parameters]
        weights = [local(p) for p in parameters]
        _fused(weights, [_gradient(p) for p in parameters], states, group)
        if self._ema is not None:
            for weight, state in zip(weights, states, strict=True):
                _mix_in(local(state["ema"]), weight, state["step"], self._ema)

    def _update_by_rows(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, weight, gradient = self.state[parameter], local(parameter), _gradient(parameter)
        step = state["step"]
        for rows, noise in self._row_blocks(parameter, step):
            kept = {name: local(tensor)[rows] for name, tensor in state.items() if name != "step"}
            here = {name: part.to(weight.device, non_blocking=True) for name, part in kept.items()}
            if noise is None and MOMENTS[0] + "_absmax" not in here:
                _fused([weight[rows]], [gradient[rows]], [here | {"step": step}], group)
            else:
                _update(weight[rows], gradient[rows], here, int(step), group, noise)
            if self._ema is not None:
                _mix_in(here["ema"], weight[rows], step, self._ema)
            for name, part in here.items():
                if part.device != kept[name].device:
                    kept[name].copy_(part, non_blocking=True)

    def _row_blocks(self, parameter: nn.Parameter, step: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
        """Slices of this rank's rows, and the noise to round each with where the weight is in bf16.

        Blocks are counted from the weight's first row, and drawn for whole rows, so each value gets the same noise
        whichever rank has it.
        """
        if parameter not in self._offsets:
            self._offsets[parameter] = local_part(parameter)[1]
        (first, *columns), (here, *widths) = self._offsets[parameter], local(parameter).shape
        length, *inner = parameter.shape
        mine = tuple(slice(begin, begin + width) for begin, width in zip(columns, widths, strict=True))
        height = max(1, UPDATE_VALUES // max(math.prod(inner), 1))
        for block in range(first // height, -(-(first + here) // height)):
            begin, end = block * height, min((block + 1) * height, length)
            rows = slice(max(first, begin) - first, min(first + here, end) - first)
            noise = None
            if parameter.dtype == torch.bfloat16:
                self._noise = self._noise or RoundingNoise(parameter.device)
                whole = self._noise.of(f"{self._keys[parameter]}/{int(step)}/{block}", (end - begin, *inner))
                noise = whole[(slice(rows.start + first - begin, rows.stop + first - begin), *mine)]
            yield rows, noise


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "parameters without a gradient were left out"
    return local(parameter.grad)


def _fused(
    weights: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]
) -> None:
    """One step of torch's own kernel."""
    torch._fused_adamw_(
        weights,
        gradients,
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _update(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    step: int,
    group: dict[str, Any],
    noise: Tensor | None,
) -> None:
    """One step of some rows, in fp32 whatever is kept. `noise` rounds a weight in bf16, None leaves one in fp32."""
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    scales = [state.get(f"{moment}_absmax") for moment in MOMENTS]
    if noise is None and weight.is_cuda and eight_bit.has_kernel(state):
        eight_bit.update_in_one_pass(weight, gradient, state, step, group)
        return
    gradient, exact = gradient.float(), weight.float()
    m, v = (
        state[moment] if scale is None else eight_bit.decode(state[moment], scale, moment)
        for moment, scale in zip(MOMENTS, scales, strict=True)
    )
    m.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    denominator = (v.sqrt() / math.sqrt(1.0 - beta2**step)).add_(group["eps"])
    exact.mul_(1.0 - lr * decay).addcdiv_(m, denominator, value=-lr / (1.0 - beta1**step))
    if noise is not None:
        weight.copy_(round_stochastically(exact, noise))
    for moment, scale, value in zip(MOMENTS, scales, (m, v), strict=True):
        if scale is not None:
            eight_bit.encode_into(state[moment], scale, value, moment)


def _mix_in(mean: Tensor, weight: Tensor, step: Tensor, decay: float) -> None:
    """One step of an exponential moving average. `step` is a scalar, 1 at the first."""
    kept = ((1 + step) / (10 + step)).clamp_(max=decay).to(mean.device)
    mean.lerp_(weight.float(), 1 - kept)
