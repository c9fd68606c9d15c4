"""The loss that keeps the experts of a mixture equally busy (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6).

It is transformers' own function, over the router's logits of all layers of one pass, and is added to the training loss
with the weight that the job gives (`routerAuxLossCoef`); else, where the model's config.json says
`output_router_logits`, with its `router_aux_loss_coef`, as the class itself does.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from muster.trainer.errors import UserError
from muster.trainer.models.logits import IGNORED


def set_weight(model: Any, weight: float) -> None:
    """Set what the loss is multiplied by, whatever the model's config.json says. Raises UserError where the model has
    no such loss."""
    if weight and _function(model) is None:
        raise UserError(
            f"routerAuxLossCoef {weight:g}: a {type(model).__name__} has no load-balancing loss: it is no mixture of "
            "experts, or transformers has none for it; leave it out"
        )
    model.load_balancing_weight = weight  # a name that no class of transformers has: some keep router_aux_loss_coef


def weight_of(model: Any) -> float:
    """Return the factor of the load-balancing loss; 0 where the model has none, or neither job nor config.json asks for
    it."""
    given: float | None = getattr(model, "load_balancing_weight", None)
    if given is not None:
        return given
    config = model.config
    asked = bool(getattr(config, "output_router_logits", False)) and _function(model) is not None
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if asked else 0.0


def weighted(model: Any, router_logits: tuple[Tensor, ...], documents: Tensor, labels: Tensor) -> Tensor:
    """The loss of one pass, times its weight and its scored tokens; an fp32 scalar.

    So it goes into a sum over scored tokens as the pass's share of the step's mean. Padding (documents below 0) is left
    out. `router_logits` are [B * T, experts], of each layer; documents and labels [B, T].
    """
    function = _function(model)
    assert function is not None, "weight_of is 0 for such a model"
    loss: Tensor = function(router_logits, model.num_experts, model.num_experts_per_tok, documents >= 0)
    model.load_balancing_loss = loss.detach()
    return weight_of(model) * loss * (labels != IGNORED).sum()


def last(model: nn.Module) -> float | None:
    """The loss of the last pass on this rank, without its weight: 1 for each chosen expert where all are equally busy;
    None where there is none."""
    loss = getattr(model, "load_balancing_loss", None)
    return None if loss is None else float(loss)


def _function(model: Any) -> Any:
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return next((f for module in modules if (f := getattr(module, "load_balancing_loss_func", None))), None)
