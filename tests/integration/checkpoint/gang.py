"""Ranks for tests: forked from a process that has loaded torch, each doing one thing."""

import hashlib
import json
import os
import socket
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests import torch_server
from tests.fork_server import Order, end_with
from tests.polling import WAIT_SECONDS_MAX

VOCABULARY = 37
SAMPLES_PER_STEP, SAMPLES_PER_EPOCH = 24, 100


def run_gang(
    world: int, shard: str, do: str, folder: str, timeout: float = 4 * WAIT_SECONDS_MAX, **options: Any
) -> list[dict[str, Any]]:
    """What each rank says. Raises AssertionError with their words where one fails."""
    with tempfile.TemporaryDirectory() as meeting:
        order = {"world": world, "shard": shard, "do": do, "folder": folder, "meeting": meeting, **options}
        process, connection = torch_server.start(be_gang, order)
        connection.close()
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        words = Path(meeting, "log").read_text()
        assert code == 0, f"exit code {code}\n{words}"
        return [json.loads(Path(meeting, f"rank-{rank}.json").read_text()) for rank in range(world)]


def be_gang(connection: socket.socket, order: Order) -> None:
    """Fork the ranks and wait for them. Raises RuntimeError where one of them fails."""
    log = os.open(f"{order['meeting']}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    children, parent = {}, os.getpid()
    for rank in range(order["world"]):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                end_with(parent)
                _rank(rank, order)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children[pid] = rank
    failed = False
    while children:
        pid, status = os.wait()
        del children[pid]
        if os.waitstatus_to_exitcode(status) != 0 and not failed:
            failed = True
            for other in children:
                os.kill(other, 9)
    if failed:
        raise RuntimeError("a rank failed")


def _rank(rank: int, order: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from muster.trainer.checkpoint.upload_process import fork_while_young

    if order["do"] == "train":
        fork_while_young(order["folder"])  # as a rank does, before it has a thread
    torch.set_num_threads(1)
    world = order["world"]
    if world > 1 or order["shard"] != "none":
        store = dist.FileStore(f"{order['meeting']}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    said = {"train": _train, "load": _load, "resume": _load}[order["do"]](rank, order)
    Path(order["meeting"], f"rank-{rank}.json").write_text(json.dumps(said))
    if dist.is_initialized():
        dist.destroy_process_group()


def _train(rank: int, order: dict[str, Any]) -> dict[str, Any]:
    """Train and save after each step; the outcomes, a digest of the state at each, and the samples of each step."""
    from muster.trainer.checkpoint import CheckpointSaver, TrainState, resume
    from muster.words.job import Keep

    model, optimizer = build(order["shard"], seed=0, frozen=order.get("frozen", False), ours=order.get("ours", False))
    saver = CheckpointSaver(identity(order), Keep(last=order.get("last", 3)), {"shard": order["shard"]})
    saver.prepare(model, optimizer)
    cursor, first = None, 1
    if (resumed := order.get("resume")) is not None:
        commit = resume(order["folder"], resumed, model, optimizer, print)
        saver.resumed(commit, model)
        cursor, first = commit.cursor, commit.step + 1
    loader = samples(rank, order["world"], cursor)
    outcomes, digests, blocked, ids = [], {}, [], {}
    for step in range(first, order["steps"] + 1):
        batch = loader.next()
        step_once(model, optimizer, step)
        ids[step] = batch.sample_ids
        state = TrainState(
            model, optimizer, step, 8 * step, batch.cursor, {"step": step, "nothing": None}, {"rank": rank},
            {"evaluation_loss": 1.0 / step, "broken": float("nan")}, best=False,
        )  # fmt: skip
        left, terminating = order.get("seconds_left"), rank in order.get("terminating", ())
        blocked.append(saver.save(state, emergency=True, seconds_left=left, terminating=terminating))
        digests[step] = digest(model, optimizer)
        outcomes += saver.finished()
        if step == order.get("kill_uploader_at"):
            os.kill(saver._process.pid, 9)
    outcomes += saver.drain(WAIT_SECONDS_MAX)
    saver.close()
    loader.close()
    return {"outcomes": [asdict(outcome) for outcome in outcomes], "digests": digests, "blocked": blocked, "ids": ids}


def _load(rank: int, order: dict[str, Any]) -> dict[str, Any]:
    from muster.trainer.checkpoint import load, resume
    from muster.trainer.errors import StorageError, UserError

    model, optimizer = build(
        order["shard"],
        seed=1,
        extra=order.get("extra", False),
        frozen=order.get("frozen", False),
        ours=order.get("ours", False),
    )
    before = digest(model, optimizer)
    notes: list[str] = []
    try:
        if order["do"] == "load":
            commit = load(order["folder"], order["step"], model, None if order.get("weights_only") else optimizer)
        else:
            commit = resume(order["folder"], order["step"], model, optimizer, notes.append)
    except (StorageError, UserError) as error:
        untouched = digest(model, optimizer) == before
        return {"error": str(error), "kind": type(error).__name__, "untouched": untouched, "notes": notes}
    loaded = digest(model, optimizer)
    loader = samples(rank, order["world"], commit.cursor)
    ids = [loader.next().sample_ids for _ in range(2)]
    loader.close()
    step_once(model, optimizer, commit.step + 1)
    said = {"step": commit.step, "state": commit.state, "rng": commit.rng, "ids": ids, "notes": notes}
    return {**said, "digest": loaded, "next_digest": digest(model, optimizer)}


def identity(order: dict[str, Any]) -> Any:
    from muster.trainer.checkpoint import SaverIdentity

    return SaverIdentity(
        "job", "uid", order.get("attempt", 1), order.get("fence"), order["folder"], {"seed": 0}, {"dim": 16}, {}
    )


def build(shard: str, seed: int, extra: bool = False, frozen: bool = False, ours: bool = False) -> tuple[Any, Any]:
    """A small net with a tied head, shapes that no world size divides, and an integer buffer; and its AdamW.

    frozen: only the norms are trained. ours: by the trainer's own AdamW, in a net whose shapes tensor parallelism can
    divide by two. With `tensor` each block is split over two ranks by columns and rows, as tensor parallelism does, and
    sharded by FSDP over the two halves of a gang of four.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    width = 14 if ours else 13

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 16)
            self.blocks = nn.ModuleList(Block() for _ in range(4 if extra else 3))
            self.head = nn.Linear(16, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("steps_seen", torch.full((5,), seed, dtype=torch.int64))
            self.register_buffer("not_kept", torch.full((2,), float(seed)), persistent=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(seed)
    model: nn.Module = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "norm" in name)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if shard == "tensor":
        _split_tensors(model)
    elif shard == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif shard != "none":
        replicas = 2 if shard == "hsdp" else 1
        mesh = (
            init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
            if shard == "hsdp"
            else init_device_mesh("cpu", (world,))
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=shard != "zero2")
        fully_shard(model, mesh=mesh, reshard_after_forward=shard != "zero2")
    if ours:
        from muster.recipe.optimizer_config import OptimizerConfig
        from muster.trainer.train.optimizer import make_optimizer

        return model, make_optimizer(model, OptimizerConfig(lr=1e-2))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _split_tensors(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def step_once(model: Any, optimizer: Any, step: int) -> None:
    """One optimizer step on every rank's copy of the same batch, so that no reduction rounds differently."""
    import torch
    from torch import nn

    tokens = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
    logits = model(tokens)
    nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens.roll(1, 1).reshape(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: Any, optimizer: Any) -> dict[str, str]:
    """By name: the hash of the whole tensor's bytes. Collective."""
    import torch
    from torch.distributed.tensor import DTensor

    from muster.trainer.checkpoint.tensors import model_tensors, optimizer_tensors

    found = {}
    for name, tensor in [*model_tensors(model), *optimizer_tensors(model, optimizer)]:
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
        found[name] = hashlib.sha256(bytes(whole.view(-1).view(torch.uint8).numpy())).hexdigest()[:16]
    return found


def samples(rank: int, ranks: int, cursor: Any) -> Any:
    """The data loader of the trainer over a data set whose samples are nothing but their number."""
    import numpy as np

    from muster.trainer.config import DataParallel
    from muster.trainer.data.loader import RankLoader
    from muster.trainer.data.packing import PackedSample
    from muster.words.checkpoint import DataCursor

    class Numbered:
        seed, samples_per_epoch = 0, SAMPLES_PER_EPOCH

        def sample(self, epoch: int, index: int) -> PackedSample:
            row = np.full(2, epoch * SAMPLES_PER_EPOCH + index, np.int32)
            return PackedSample(row, row, row, row)

    start = cursor or DataCursor(seed=0, epoch=0, sample=0)
    return RankLoader(Numbered(), start, SAMPLES_PER_STEP, 1, DataParallel(ranks, (rank,)), "cpu")
