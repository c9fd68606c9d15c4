"""One peer of benchmarks/checkpoint.py, in a process of its own: saves and loads once, prints {"save": MB/s, "load":
MB/s}.

python benchmarks/checkpoint_peers.py PEER WHERE MEGABYTES [PLACE FOR TEMPORARY FILES | SAVES]
"""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEGA = 1_000_000
ENDPOINT = os.environ.get("MUSTER_S3_ENDPOINT")


def main() -> None:
    peer, where, megabytes, place = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if peer == "training":
        return training(where, megabytes, int(place))
    peers: dict[str, Callable[[str, int, str], dict[str, float]]] = {
        "boto3": boto3_raw, "s5cmd": s5cmd_raw, "copy": file_copy, "muster": muster,
        "dcp-sync": dcp_sync, "dcp-async": dcp_async, "dcp-fsspec": dcp_fsspec,
    }  # fmt: skip
    seconds = peers[peer](where, megabytes, place)
    print(json.dumps({way: megabytes / taken for way, taken in seconds.items()}))


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def boto3_raw(where: str, megabytes: int, place: str) -> dict[str, float]:
    """boto3's own transfer manager, from memory to memory; the better of two concurrencies."""
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=ENDPOINT)
    bucket, _, key = where.removeprefix("s3://").partition("/")
    data, best = os.urandom(megabytes * MEGA), {"save": float("inf"), "load": float("inf")}
    for threads in (4, 10):
        config = TransferConfig(max_concurrency=threads, multipart_chunksize=16 << 20)
        into = io.BytesIO()
        taken = {
            "save": timed(lambda c=config: client.upload_fileobj(io.BytesIO(data), bucket, key, Config=c)),
            "load": timed(lambda c=config, i=into: client.download_fileobj(bucket, key, i, Config=c)),
        }
        assert into.getvalue() == data
        best = {way: min(best[way], taken[way]) for way in best}
    return best


def quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def s5cmd_raw(where: str, megabytes: int, place: str) -> dict[str, float]:
    """s5cmd, from and to tmpfs where there is one; the better of two concurrencies."""
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else place) / f"s5cmd-{os.getpid()}"
    folder.mkdir()
    best = {"save": float("inf"), "load": float("inf")}
    try:
        (folder / "up").write_bytes(os.urandom(megabytes * MEGA))
        for parts in ("5", "10"):
            copy = [os.environ["S5CMD"], "--endpoint-url", str(ENDPOINT), "cp", "-c", parts, "-p", "16"]
            up, down = str(folder / "up"), str(folder / "down")
            taken = {
                "save": timed(lambda c=copy, u=up: quietly([*c, u, where])),
                "load": timed(lambda c=copy, d=down: quietly([*c, where, d])),
            }
            best = {way: min(best[way], taken[way]) for way in best}
    finally:
        shutil.rmtree(folder)
    return best


def file_copy(where: str, megabytes: int, place: str) -> dict[str, float]:
    """One write with fsync, one read: the limit of the folder."""
    data, path = os.urandom(megabytes * MEGA), Path(where)
    path.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        with path.open("wb", buffering=0) as file:
            view = memoryview(data)
            while len(view):
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    into = bytearray(len(data))

    def load() -> None:
        with path.open("rb", buffering=0) as file:
            view = memoryview(into)
            while len(view):
                view = view[file.readinto(view) :]  # type: ignore[attr-defined]

    taken = {"save": timed(save), "load": timed(load)}
    path.unlink()
    return taken


def state(megabytes: int) -> tuple[Any, Any]:
    """A model of 24 matrices whose weights and two moments are `megabytes` together, after one step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    columns = 1_024
    rows = megabytes * MEGA // (4 * 3 * 24 * columns)
    model = nn.Module()
    for number in range(24):
        model.register_parameter(f"weight_{number}", nn.Parameter(torch.randn(rows, columns)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def train_state(model: Any, optimizer: Any, step: int) -> Any:
    from muster.contract.checkpoint import DataCursor
    from muster.trainer.checkpoint import TrainState

    return TrainState(model, optimizer, step, 0, DataCursor(seed=0, epoch=0, sample=0), {}, {}, {}, False)


def muster(where: str, megabytes: int, place: str) -> dict[str, float]:
    """Until the COMMIT is published: staged, uploaded, verified."""
    import torch

    from muster.contract.spec import Keep
    from muster.trainer.checkpoint import Identity, Saver, load

    model, optimizer = state(megabytes)
    saver = Saver(Identity("bench", "bench", 1, None, where, {}, {}, {}), Keep(last=1), {})
    saver.prepare(model, optimizer)
    warm, warm_optimizer = state(1)
    saver.save(train_state(warm, warm_optimizer, 1))  # the upload process has started and connected
    assert all(outcome.committed for outcome in saver.drain(60))

    def save() -> None:
        saver.save(train_state(model, optimizer, 2), urgent=True)
        (outcome,) = saver.drain(600)
        assert outcome.committed, outcome.error

    taken = {"save": timed(save)}
    fresh, fresh_optimizer = state(megabytes)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    taken["load"] = timed(lambda: load(where, 2, fresh, fresh_optimizer))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    saver.close()
    return taken


def dcp_sync(where: str, megabytes: int, place: str) -> dict[str, float]:
    import torch.distributed.checkpoint as dcp

    return _dcp(
        where, megabytes, dcp.FileSystemWriter(where, thread_count=2), dcp.FileSystemReader(where), asynchronous=False
    )


def dcp_async(where: str, megabytes: int, place: str) -> dict[str, float]:
    import torch.distributed.checkpoint as dcp

    return _dcp(
        where, megabytes, dcp.FileSystemWriter(where, thread_count=2), dcp.FileSystemReader(where), asynchronous=True
    )


def dcp_fsspec(where: str, megabytes: int, place: str) -> dict[str, float]:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    options = {
        "endpoint_url": ENDPOINT,
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    writer = FsspecWriter(where, thread_count=2, **options)
    return _dcp(where, megabytes, writer, FsspecReader(where, **options), asynchronous=False)


def _dcp(where: str, megabytes: int, writer: Any, reader: Any, asynchronous: bool) -> dict[str, float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = state(megabytes)

    def whole(model: Any, optimizer: Any) -> dict[str, Any]:
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states}

    def save() -> None:
        if asynchronous:
            dcp.async_save(whole(model, optimizer), storage_writer=writer, no_dist=True).result()
        else:
            dcp.save(whole(model, optimizer), storage_writer=writer, no_dist=True)

    taken = {"save": timed(save)}
    fresh, fresh_optimizer = state(megabytes)

    def load() -> None:
        into = whole(fresh, fresh_optimizer)
        dcp.load(into, storage_reader=reader, no_dist=True)
        set_state_dict(fresh, fresh_optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])

    taken["load"] = timed(load)
    return taken


def training(where: str, megabytes: int, saves: int) -> None:
    """Two ranks, each with its own `megabytes` of shards (FSDP over both), that save while they compute."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from muster.contract.spec import Keep
    from muster.trainer.checkpoint import Identity, Saver

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, layers = 1_024, world * megabytes * MEGA // (4 * 3 * 1_024 * 1_024)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    saver = Saver(Identity("bench", "bench", 1, None, where, {}, {}, {}), Keep(last=1), {})
    saver.prepare(model, optimizer)

    def step() -> float:
        began = time.perf_counter()
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    step()
    blocked, beside, committed, written = [], [], 0, 0
    quiet: list[float] = []
    for number in range(1, saves + 1):
        quiet += [step() for _ in range(2)]
        dist.barrier()
        blocked.append(saver.save(train_state(model, optimizer, number)))
        # Every rank sees the same number of steps beside the upload, whoever is done first.
        beside += [step() for _ in range(3)]
        for outcome in saver.drain(120):
            committed += outcome.committed
            written = max(written, outcome.bytes)
    shard = 3 * sum(parameter._local_tensor.nbytes for parameter in model.parameters())
    uploader = Path(f"/proc/{saver._process.pid}/status").read_text()
    private = int(uploader.split("RssAnon:")[1].split()[0]) * 1024
    memory = saver._staging._memory
    assert memory is not None
    ordered = sorted(blocked[1:])
    report = {
        "saves": saves,
        "committed": committed,
        "blocked_first": blocked[0],
        "blocked_p50": statistics.median(ordered),
        "blocked_p99": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)],
        "step_quiet": statistics.median(quiet),
        "step_uploading": statistics.median(beside),
        "extra_memory": (memory.size + private) / shard,
        "bytes_written": written / shard,
    }
    Path(f"{where}-{rank}.json").write_text(json.dumps(report))
    saver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
