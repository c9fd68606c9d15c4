"""AdamW over the decoder's parameters, gradient clipping, and the loss scale of fp16."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from muster.contract.optimizer_config import OptimizerConfig
from muster.trainer.models.shards import local


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) of all that is not frozen. Norms (and any other vector) do not
    decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return ShardAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


class ShardAdamW(torch.optim.AdamW):
    """torch's fused AdamW, applied to this rank's shards themselves: the update is elementwise, so a DTensor's way
    through the dispatcher (milliseconds a step) buys nothing. State and its names are torch's."""

    # torch's own of these two load the compiler, which takes half a second, to tell it to keep away.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.AdamW.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none, "a gradient of zeros would still take its memory"
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "a closure is for optimizers that look again"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in parameters]
            steps = [state["step"] for state in states]
            if not parameters:
                continue
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [local(p) for p in parameters],
                [local(p.grad) for p in parameters],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        return state


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """The sum of the squares of all values, fp64 scalar. Not finite where any value is not."""
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def clip_factor(norm: float, clip_norm: float) -> float:
    """What to multiply gradients by; 1 where clipping is off (0) or not needed. As torch.nn.utils.clip_grad_norm_."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0


@dataclass
class LossScale:
    """Keeps fp16 gradients in range: halved when they overflow (that step is skipped), doubled after 2,000 good steps.

    The overflow is seen in the gradient norm that all ranks share, so all ranks decide alike (Micikevicius et al. 2018,
    arXiv 1710.03740). For fp32 and bf16 it stays at 1.
    """

    enabled: bool
    value: float = 65_536.0
    good_steps: int = 0

    GROW_AFTER = 2_000
    SMALLEST = 2.0**-14

    def __post_init__(self) -> None:
        if not self.enabled:
            self.value = 1.0

    def accepts(self, norm: float) -> bool:
        """Whether to take the step; moves the scale. A norm that is not finite is forgiven where a scale can shrink."""
        if not self.enabled:
            return True
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps >= self.GROW_AFTER:
                self.value, self.good_steps = self.value * 2, 0
            return True
        self.value, self.good_steps = self.value / 2, 0
        return False

    @property
    def exhausted(self) -> bool:
        return self.value < self.SMALLEST

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "goodSteps": self.good_steps}

    def restore(self, state: dict[str, Any]) -> None:
        if self.enabled and state:
            self.value, self.good_steps = float(state["value"]), int(state["goodSteps"])
