"""FSDP with parameters of integers (weights in four bits), for torch before 2.13, whose FSDP does not expect them.

It makes each shard a parameter before it tells it not to learn, which integers refuse; and it casts all that it gathers
to the dtype of the activations, integers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

_EXPECTED = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


@contextmanager
def integers_expected() -> Iterator[None]:
    """While it lasts, `fully_shard` takes parameters of integers; what it has sharded then gathers them as they are."""
    if _EXPECTED:
        yield
        return
    _gather_as_they_are()
    new = nn.Parameter.__new__

    def parameter(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
        made: nn.Parameter = new(cls, data, requires_grad and (data is None or data.is_floating_point()))
        return made

    nn.Parameter.__new__ = parameter  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Parameter.__new__ = new  # type: ignore[method-assign]


@cache
def _gather_as_they_are() -> None:
    """Keep FSDP, from now on, from casting integers."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    sharded: Any = _fsdp_param.FSDPParam
    initialize = sharded.init_dtype_attrs

    def init_dtype_attrs(self: Any, mp_policy: Any) -> None:
        initialize(self, mp_policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    sharded.init_dtype_attrs = init_dtype_attrs
