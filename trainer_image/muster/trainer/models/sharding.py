"""Sharding of a model over the ranks: the device, the layout that fits in its memory, and the model laid out so."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muster.plan import fitting
from muster.plan.layouts import SMALLEST, ModelLayout, layout_of
from muster.plan.memory import USABLE, Device, MemoryNeed
from muster.plan.model_size import ModelSize
from muster.recipe.training import Precision, TrainingConfig
from muster.trainer.config import DataParallel, RankPosition, data_parallel
from muster.trainer.errors import OutOfMemory, UserError
from muster.trainer.gpus import must_have_gpus, read_facts
from muster.trainer.models import load_balancing
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.embedding_noise import add_noise
from muster.trainer.models.float8 import use_float8
from muster.trainer.parallel.groups import groups
from muster.trainer.parallel.shards import local, replicas_of
from muster.trainer.parallel.wrapping import replicate, shard_by_groups
from muster.words.names import Env

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # but in the products of linear layers
}


def choose_device(ranks: RankPosition, environ: Mapping[str, str] = os.environ) -> torch.device:
    """This rank's device. Raises UserError or NodeUnfit when the worker can't have a GPU for each of its ranks."""
    asked = environ.get(Env.DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cpu":
        return torch.device("cpu")
    if asked != "cuda":
        raise UserError(f"{Env.DEVICE} must be cpu or cuda, not {asked!r}")
    must_have_gpus(read_facts(environ), ranks.local_world)
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def capacity(device: torch.device, ranks: RankPosition) -> int:
    """Bytes that this rank may use: the GPU's, or its share of the machine's (or the control group's limit).

    Total memory, not what is free at this moment: `auto` must choose alike at every start and on every rank.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory(ranks)


def host_memory(ranks: RankPosition) -> int:
    """This rank's share of the machine's memory, or of the control group's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, _cgroup_limit() or machine) // ranks.local_world


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None


@dataclass(frozen=True)
class ShardLayout(ModelLayout):
    """The sharding in force, with `auto` resolved."""

    division: DataParallel  # of a step's samples
    hold_gradients: bool  # accumulate whole gradients without synchronising until the last micro-step
    need: MemoryNeed  # the memory that a rank is expected to need

    def describe(self) -> dict[str, Any]:
        """The sharding as Commit.mesh holds it."""
        tokens = self.division.ranks_per_share
        return {"shard": self.shard, "replicas": self.replicas, "shards": self.shards} | (
            {"context": tokens} if tokens > 1 else {}
        )


def host_of(model: ModelDefinition, capacity: int, device: torch.device) -> fitting.RankHost:
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    return fitting.RankHost(capacity, kind, model.casts_weights)


def plan(
    model: ModelDefinition,
    training: TrainingConfig,
    ranks: RankPosition,
    capacity: int,
    device: torch.device = torch.device("cpu"),
    second: tuple[ModelSize, ...] = (),
) -> ShardLayout:
    """Decide the sharding, of a model and of second ones that only compute forward.

    Raises UserError for an impossible hsdp, OutOfMemory when `auto` finds nothing that fits.
    """
    division, host = data_parallel(training, ranks), host_of(model, capacity, device)
    size = replace(model.size(), second=second)
    count, shard = ranks.world, training.parallel.shard
    if shard == "auto":
        lowest = fitting.lowest_that_fits(size, training, count, ranks.nodes, host)
        if lowest is None:
            need = fitting.need_of(size, training, SMALLEST, count, ranks.nodes, host)
            raise OutOfMemory(fitting.advice(size, training, need, count, ranks.nodes, host))
        shard = lowest[0]
    try:
        layout = layout_of(training, shard, count, ranks.nodes)
    except ValueError as error:
        raise UserError(str(error)) from None
    need = fitting.need_of(size, training, shard, count, ranks.nodes, host)
    spare = USABLE * capacity - need.total - 4 * size.learning
    hold = layout.keeps_gathered or spare >= 0
    return ShardLayout(layout.shard, layout.replicas, layout.shards, division, hold_gradients=hold, need=need)


class ParallelModel:
    """The model on this rank, replicated or sharded as the layout says, with its initial weights.

    `values` is false where a commit's values are loaded anyway.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        training: TrainingConfig,
        layout: ShardLayout,
        ranks: RankPosition,
        device: torch.device,
        values: bool = True,
    ) -> None:
        self.layout, self.device = layout, device
        self.division = layout.division  # of a step's samples
        # Ranks that gradients are averaged over; multiply a loss by it where a sum is wanted.
        self.averaged_over = ranks.world
        # Every rank has all gradients after a backward pass.
        self.replicated = layout.is_whole and ranks.world > 1
        dtype = DTYPES[training.precision]
        # The model without DDP's wrapper, for names and state; `model` is what to call.
        self.module = definition.build(dtype, training.parallel.activation_checkpointing)
        if not training.optimizer.master_weights:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(dtype)
        if training.router_aux_loss_coef is not None:
            load_balancing.set_weight(self.module, training.router_aux_loss_coef)
        if training.neftune_noise_alpha is not None:
            add_noise(definition.embedding(self.module), training.neftune_noise_alpha)
        if training.precision == "fp8":
            use_float8(self.module)
        # Where several ranks compute a share, each has a part of its rows' tokens.
        among = groups().model
        self.split = definition.split_tokens(self.module, among) if among.size > 1 else None
        # the repeated blocks, first to last, which are sharded, compiled and timed one by one
        self.layers = definition.layers(self.module)
        # FSDP casts weights for layers that do not: those of transformers, and all that multiply in float8.
        uncast = training.precision == "fp8" or _needs_casting(definition, self.module, dtype)
        self._by_fsdp = not layout.is_whole or uncast
        if self._by_fsdp:
            shard(self.module, definition, layout, device, dtype)
        definition.fill(self.module, device, training.seed, values)
        if training.parallel.compile:
            for layer in self.layers:
                layer.compile()
        self.model: nn.Module = self.module
        if self.replicated and not self._by_fsdp:
            self.model = replicate(self.module, device, training.deterministic)
        self._parameters = list(self.module.parameters())
        self._replicas = {parameter: replicas_of(parameter, ranks.world) for parameter in self._parameters}
        self._now = (True, True)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Around one forward and backward pass; gradients meet at the last of an optimizer step (or, to save memory, at
        each)."""
        sync = last or not self.layout.hold_gradients
        if self._by_fsdp:
            if (sync, last) != self._now:  # these walk over all modules
                self.module.set_requires_gradient_sync(sync)  # type: ignore[operator]
                self.module.set_is_last_backward(last)  # type: ignore[operator]
                self._now = (sync, last)
            yield
        elif sync or not self.replicated:
            yield
        else:
            with self.model.no_sync():  # type: ignore[operator]
                yield

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """This rank's part of every gradient."""
        return [local(p.grad) for p in self._parameters if p.grad is not None]

    def gradient_replicas(self) -> list[int]:
        """The number of ranks that hold the same part, of each of `gradients`."""
        return [self._replicas[p] for p in self._parameters if p.grad is not None]


def _needs_casting(definition: ModelDefinition, model: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether weights that every rank holds whole must still be cast for each pass, as FSDP does: modules of
    transformers compute in the dtype of their weights."""
    return not definition.casts_weights and any(p.dtype not in (dtype, torch.uint8) for p in model.parameters())


def shard(
    model: nn.Module, definition: ModelDefinition, layout: ShardLayout, device: torch.device, dtype: torch.dtype
) -> None:
    """Shard a model by FSDP2: a group per layer, and the definition's lone ones."""
    groups = (*definition.layers(model), *definition.lone_groups(model))
    # With ddp each rank's shard is the whole.
    sizes = {"replicate": layout.replicas, "shard": layout.shards}
    shard_by_groups(model, groups, sizes, not layout.keeps_gathered, device, dtype)
