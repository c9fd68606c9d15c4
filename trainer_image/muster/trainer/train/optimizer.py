"""The optimizer of a model, gradient clipping, and the loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from muster.recipe.optimizer_config import OptimizerConfig
from muster.trainer.errors import UserError
from muster.trainer.models.named import named_by
from muster.trainer.train.adamw import ShardAdamW


def make_optimizer(model: nn.Module, config: OptimizerConfig, seed: int = 0) -> ShardAdamW:
    """AdamW of all that is not frozen. Norms (and any other vector) do not decay. `seed` is the job's. Raises UserError
    where eight bits are asked for and their kernels can't be loaded."""
    return ShardAdamW(parameter_groups(model, config), config, seed)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, as torch calls them: all trained parameters, first those that
    `optimizer.groups` does not name. `rate_scale` multiplies the schedule's rate. Raises UserError for patterns that no
    trained parameter matches, and for a parameter in two groups."""
    owners: dict[nn.Parameter, int] = {}
    for number, each in enumerate(config.groups):
        path = f"optimizer.groups[{number}]"
        named = {p: name for p, name in named_by(model, each.parameters, path).items() if p.requires_grad}
        if not named:
            raise UserError(f"{path}: {', '.join(each.parameters)} match only weights that are not trained")
        taken = next((p for p in named if p in owners), None)
        if taken is not None:
            raise UserError(
                f"{path} and optimizer.groups[{owners[taken]}] both match {named[taken]}; leave it out of one of them"
            )
        owners |= dict.fromkeys(named, number)
    groups: list[dict[str, Any]] = []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number, of in enumerate((None, *config.groups), start=-1):
        own = [parameter for parameter in parameters if owners.get(parameter, -1) == number]
        decay = config.weight_decay if of is None or of.weight_decay is None else of.weight_decay
        scale = 1.0 if of is None or of.lr is None else of.lr / config.lr
        groups += [
            {"params": [p for p in own if p.ndim >= 2], "weight_decay": decay, "rate_scale": scale},
            {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0, "rate_scale": scale},
        ]
    return groups


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the schedule's rate, of which each group takes its multiple."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_scale"]


def squared_norm(gradients: list[Tensor], replicas: Sequence[int] | None = None) -> Tensor:
    """The sum of the squares of all values, fp64 scalar. Not finite where any value is not.

    `replicas` counts for each gradient the ranks that hold the same part of it: a rank then gives that fraction of its
    square, so that the sum over all ranks counts each value once.
    """
    # Of gradients in bf16 the norm would be rounded to bf16.
    exact = None if all(g.dtype == torch.float32 for g in gradients) else torch.float32
    squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=exact)).double().square()
    if replicas is None:
        return squares.sum()
    if len(set(replicas)) == 1:
        return squares.sum() / replicas[0]
    return (squares / torch.tensor(replicas, dtype=torch.float64, device=squares.device)).sum()


def clip_factor(norm: float, clip_norm: float) -> float:
    """Return the factor for gradients; 1 where clipping is off (0) or not needed. It is that of
    torch.nn.utils.clip_grad_norm_."""
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
        """Return whether to take the step, and adjust the scale. While scaling, a norm that is not finite skips the
        step and halves the scale."""
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
