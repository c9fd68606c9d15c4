"""How the decoder is spread over the ranks: device, process group, sharding. The only file that knows of meshes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.contract.architecture import Architecture
from muster.contract.names import Env
from muster.contract.training import Precision, Shard, TrainingConfig
from muster.trainer.config import Ranks, accumulation
from muster.trainer.errors import OutOfMemory, UserError
from muster.trainer.models import memory
from muster.trainer.models.decoder import Decoder, build
from muster.trainer.models.init import initialize
from muster.trainer.models.lora import attach

# Long enough for a slow peer that prepares data or loads a commit; a dead one breaks the connection at once.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> torch.device:
    """This rank's device. Raises UserError when the worker can't have a GPU for each of its ranks."""
    asked = environ.get(Env.DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cpu":
        return torch.device("cpu")
    if asked != "cuda":
        raise UserError(f"{Env.DEVICE} must be cpu or cuda, not {asked!r}")
    seen = torch.cuda.device_count()
    if seen < ranks.local_world:
        raise UserError(
            f"this worker runs {ranks.local_world} ranks but sees {seen} GPUs: set gang.gpusPerNode to what the node "
            f"has, or 0 (and {Env.DEVICE}=cpu) to train on the CPU"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def capacity(device: torch.device, ranks: Ranks) -> int:
    """Bytes that this rank may use: the GPU's, or its share of the machine's (or the control group's limit).

    Total memory, not what is free at this moment: `auto` must choose alike at every start and on every rank.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory(ranks)


def host_memory(ranks: Ranks) -> int:
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


def connect(device: torch.device, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Meet the other ranks, if that has not happened. A process without torchrun's variables becomes a gang of one."""
    if dist.is_initialized():
        return
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        environ.setdefault(name, value)
    if all_local(environ):
        # All ranks are on this machine: don't ask a name service which address it has.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device if device.type == "cuda" else None)


def all_local(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the whole gang runs on this machine."""
    return environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Layout:
    """The sharding in force, `auto` resolved. replicas: copies of the model; shards: ranks that share one copy.

    hold_gradients: accumulate whole gradients without synchronising until the last micro-step.
    """

    shard: Shard
    replicas: int
    shards: int
    hold_gradients: bool
    need: memory.Need

    def describe(self) -> dict[str, Any]:
        """For Commit.mesh."""
        return {"shard": self.shard, "replicas": self.replicas, "shards": self.shards}


def plan(architecture: Architecture, training: TrainingConfig, ranks: Ranks, capacity: int) -> Layout:
    """Decide the sharding. Raises UserError for an impossible hsdp, OutOfMemory when `auto` finds nothing that fits."""
    steps = accumulation(training, ranks.world)
    shard = training.parallel.shard
    if shard == "auto":
        found = memory.lowest_that_fits(architecture, training, ranks.world, steps, capacity)
        if found is None:
            need = memory.estimate(architecture, training, "fsdp", ranks.world, steps)
            raise OutOfMemory(memory.advice(architecture, training, need, capacity, ranks.world))
        shard = found[0]
    replicas = {"ddp": ranks.world, "hsdp": _replicas(training, ranks)}.get(shard, 1) if ranks.world > 1 else 1
    shards = ranks.world // replicas
    need = memory.estimate(architecture, training, shard, ranks.world if shard == "ddp" else shards, steps)
    whole = 4 * memory.trained(architecture, training)
    fits = need.total + whole <= capacity * memory.USABLE
    return Layout(shard, replicas, shards, hold_gradients=shard in ("ddp", "zero2") or fits, need=need)


def _replicas(training: TrainingConfig, ranks: Ranks) -> int:
    replicas = training.parallel.replicas or ranks.nodes
    if training.parallel.shard == "hsdp" and ranks.world > 1:
        if replicas == 1:
            raise UserError(
                "parallel.shard hsdp keeps a copy of the model per node, but there is one node: set parallel.replicas, "
                "or choose fsdp"
            )
        if ranks.world % replicas:
            raise UserError(f"parallel.replicas {replicas} does not divide the {ranks.world} ranks; choose a divisor")
    return replicas


class Spread:
    """The decoder on this rank, spread as the layout says, with its initial weights.

    model: what to call. decoder: the same without DDP's wrapper, for names and state. Gradients are averaged over the
    ranks, so multiply a loss by `ranks.world` where a sum is wanted.
    """

    def __init__(
        self, architecture: Architecture, training: TrainingConfig, layout: Layout, ranks: Ranks, device: torch.device
    ) -> None:
        self.layout = layout
        self.ranks = ranks
        dtype = DTYPES[training.precision]
        sharded, recompute = layout.shard != "ddp", training.parallel.activation_checkpointing
        self.decoder: Decoder = build(architecture, dtype, recompute, "meta" if sharded else device)
        if training.adapter is not None:
            attach(self.decoder, training.adapter)
        if sharded:
            _shard(self.decoder, layout, ranks, device, dtype)
            self.decoder.to_empty(device=device)
        initialize(self.decoder, architecture, training.seed, local_rows)
        if training.parallel.compile:
            for layer in self.decoder.layers:
                layer.compile()
        self.model: nn.Module = self.decoder
        if not sharded and ranks.world > 1:
            self.model = _replicate(self.decoder, device, training.deterministic)
        # A gradient's squares, added up over all ranks, are counted once per copy of the model.
        self.copies = layout.replicas
        self._parameters = list(self.decoder.parameters())
        self._now = (True, True)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Around one forward and backward pass; gradients meet at the last of an optimizer step (or, to save memory, at
        each)."""
        sync = last or not self.layout.hold_gradients
        if self.layout.shard != "ddp":
            if (sync, last) != self._now:  # these walk over all modules
                self.decoder.set_requires_gradient_sync(sync)  # type: ignore[operator]
                self.decoder.set_is_last_backward(last)  # type: ignore[operator]
                self._now = (sync, last)
            yield
        elif sync or self.ranks.world == 1:
            yield
        else:
            with self.model.no_sync():  # type: ignore[operator]
                yield

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """This rank's part of every gradient."""
        return [local(p.grad) for p in self._parameters if p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """A DTensor's shard on this rank; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_rows(parameter: Any) -> tuple[Tensor, int]:
    """The rows of a parameter on this rank, and the global index of the first."""
    if not hasattr(parameter, "to_local"):
        return parameter.data, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), int(offset[0])


def _shard(decoder: Decoder, layout: Layout, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> None:
    """FSDP2, a group per layer. An untied embedding and head are groups of their own, so that their reductions are not
    one huge one; a tied embedding stays with the final norm in the root group, which lives through the whole pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if layout.shard == "hsdp":
        mesh = init_device_mesh(device.type, (layout.replicas, layout.shards), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (ranks.world,), mesh_dim_names=("shard",))
    half = dtype != torch.float32
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": layout.shard != "zero2",
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if half else None,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        ),
    }
    for layer in decoder.layers:
        fully_shard(layer, **options)
    if not decoder.architecture.tied_head:
        fully_shard(decoder.embed, **options)
        fully_shard(decoder.head, **options)
    # The backward pass begins where the forward pass ends: what the root holds would be gathered again at once.
    fully_shard(decoder, **{**options, "reshard_after_forward": False})


def _replicate(decoder: Decoder, device: torch.device, deterministic: bool) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        decoder,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # Every rank made the same weights from the seed, so nothing need be sent to make them equal.
        init_sync=False,
        # DDP lays its buckets out anew after the first step, and a ring adds up in an order that depends on a value's
        # place in the bucket: a resumed run would differ in the last bit. To look for unused parameters keeps them.
        find_unused_parameters=deterministic,
    )
