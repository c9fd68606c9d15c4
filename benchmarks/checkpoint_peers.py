"""One peer of benchmarks/checkpoint.py, in a process of its own: saves and loads once, prints {"save": MB/s, "load":
MB/s, "save_cpu": seconds, "load_cpu": seconds}; the CPU time is of the peer and its children, not of the server.

python benchmarks/checkpoint_peers.py PEER WHERE MEGABYTES [PLACE FOR TEMPORARY FILES | SAVES | FILES OF THE FOLDER]
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import md5
from pathlib import Path
from typing import Any, cast

import psutil

MEGA = 1_000_000
PART = 16 << 20
ENDPOINT = os.environ.get("MUSTER_S3_ENDPOINT")


def main() -> None:
    peer, where, megabytes, place = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if peer == "training":
        return training(where, megabytes, int(place))
    if peer in ("memory", "fall-back"):
        from muster.trainer.checkpoint.upload_process import fork_while_young

        fork_while_young(where)  # as a rank does, which has its S3 client before torch
    if peer == "memory":
        return memory(where, megabytes, int(place))
    if peer == "fall-back":
        return fall_back(where, megabytes, Path(place))
    if peer == "export":
        return export(where, megabytes, place)
    peers: dict[str, Callable[[str, int, str], dict[str, Taken]]] = {
        "boto3": boto3_raw, "boto3-md5": boto3_checked, "s5cmd": s5cmd_raw, "copy": file_copy, "muster": muster,
        "dcp-sync": dcp_sync, "dcp-async": dcp_async, "dcp-fsspec": dcp_fsspec,
    }  # fmt: skip
    taken = peers[peer](where, megabytes, place)
    speeds = {way: megabytes / seconds for way, (seconds, _) in taken.items()}
    print(json.dumps(speeds | {f"{way}_cpu": cpu for way, (_, cpu) in taken.items()}))


Taken = tuple[float, float]  # seconds, and seconds of CPU
NEVER: Taken = (float("inf"), 0.0)


def timed(work: Callable[[], Any]) -> Taken:
    began, cpu = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - began, cpu_seconds() - cpu


def cpu_seconds() -> float:
    """Of this process, its children that live and those that ended."""
    living = [child.cpu_times() for child in psutil.Process().children()]
    return sum(os.times()[:4]) + sum(child.user + child.system for child in living)


def boto3_raw(where: str, megabytes: int, place: str) -> dict[str, Taken]:
    """boto3's own transfer manager as it comes, from memory to memory; the better of two concurrencies.

    It sends a CRC-32 and (over http) a SHA-256 of each part, which this server ignores; it checks nothing on loading.
    """
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=ENDPOINT)
    bucket, _, key = where.removeprefix("s3://").partition("/")
    data, best = os.urandom(megabytes * MEGA), {"save": NEVER, "load": NEVER}
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


def boto3_checked(where: str, megabytes: int, place: str) -> dict[str, Taken]:
    """boto3 with the integrity that Muster has here: a Content-MD5 that the server checks for each part, and a CRC-32
    of each part that is compared when it is loaded; the better of two concurrencies."""
    import boto3
    from botocore.config import Config

    plain = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
    client = boto3.client("s3", endpoint_url=ENDPOINT, config=plain)
    bucket, _, key = where.removeprefix("s3://").partition("/")
    data, best = memoryview(os.urandom(megabytes * MEGA)), {"save": NEVER, "load": NEVER}
    starts, into, checksums = range(0, len(data), PART), bytearray(len(data)), {}

    def save(threads: int) -> None:
        at = {"Bucket": bucket, "Key": key}
        at["UploadId"] = client.create_multipart_upload(**at)["UploadId"]

        def send(start: int) -> dict[str, Any]:
            part = bytes(data[start : start + PART])
            checksums[start] = zlib.crc32(part)
            number, digest = start // PART + 1, b64encode(md5(part).digest()).decode()
            return {
                "PartNumber": number,
                "ETag": client.upload_part(**at, PartNumber=number, Body=part, ContentMD5=digest)["ETag"],
            }

        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(send, starts))
        client.complete_multipart_upload(**at, MultipartUpload={"Parts": parts})

    def load(threads: int) -> None:
        def get(start: int) -> None:
            last = min(start + PART, len(data)) - 1
            part = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{last}")["Body"].read()
            assert zlib.crc32(part) == checksums[start]
            into[start : last + 1] = part

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(get, starts))

    for threads in (4, 10):
        taken = {"save": timed(lambda t=threads: save(t)), "load": timed(lambda t=threads: load(t))}
        best = {way: min(best[way], taken[way]) for way in best}
    assert into == data
    return best


def quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def s5cmd_raw(where: str, megabytes: int, place: str) -> dict[str, Taken]:
    """s5cmd, from and to tmpfs where there is one; the better of two concurrencies. It checks nothing on loading."""
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else place) / f"s5cmd-{os.getpid()}"
    folder.mkdir()
    best = {"save": NEVER, "load": NEVER}
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


def file_copy(where: str, megabytes: int, place: str) -> dict[str, Taken]:
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
    from muster.trainer.checkpoint import TrainState
    from muster.words.checkpoint import DataCursor

    return TrainState(model, optimizer, step, 0, DataCursor(seed=0, epoch=0, sample=0), {}, {}, {}, False)


def muster(where: str, megabytes: int, place: str) -> dict[str, Taken]:
    """Until the COMMIT is published: staged, uploaded, verified; and every byte compared when it is loaded."""
    import botocore.session  # noqa: F401  (as the other peers have it before the clock runs)
    import torch

    from muster.trainer.checkpoint import CheckpointSaver, SaverIdentity, load
    from muster.words.job import Keep

    model, optimizer = state(megabytes)
    saver = CheckpointSaver(SaverIdentity("bench", "bench", 1, None, where, {}, {}, {}), Keep(last=1), {})
    saver.prepare(model, optimizer)
    warm, warm_optimizer = state(1)
    saver.save(train_state(warm, warm_optimizer, 1))  # the upload process has started and connected
    assert all(outcome.committed for outcome in saver.drain(60))

    def save() -> None:
        saver.save(train_state(model, optimizer, 2), emergency=True)
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


def dcp_sync(where: str, megabytes: int, place: str) -> dict[str, Taken]:
    import torch.distributed.checkpoint as dcp

    return _dcp(
        where, megabytes, dcp.FileSystemWriter(where, thread_count=2), dcp.FileSystemReader(where), asynchronous=False
    )


def dcp_async(where: str, megabytes: int, place: str) -> dict[str, Taken]:
    import torch.distributed.checkpoint as dcp

    return _dcp(
        where, megabytes, dcp.FileSystemWriter(where, thread_count=2), dcp.FileSystemReader(where), asynchronous=True
    )


def dcp_fsspec(where: str, megabytes: int, place: str) -> dict[str, Taken]:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    options = {
        "endpoint_url": ENDPOINT,
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    writer = FsspecWriter(where, thread_count=2, **options)
    return _dcp(where, megabytes, writer, FsspecReader(where, **options), asynchronous=False)


def _dcp(where: str, megabytes: int, writer: Any, reader: Any, asynchronous: bool) -> dict[str, Taken]:
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

    from muster.trainer.checkpoint import CheckpointSaver, SaverIdentity
    from muster.words.job import Keep

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
    saver = CheckpointSaver(SaverIdentity("bench", "bench", 1, None, where, {}, {}, {}), Keep(last=1), {})
    saver.prepare(model, optimizer)

    def step() -> float:
        began = time.perf_counter()
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    for _ in range(5):
        step()
    blocked, quiet, beside, committed, written = [], [], [], 0, 0
    for number in range(1, saves + 1):
        quiet.append(step())
        dist.barrier()
        blocked.append(saver.save(train_state(model, optimizer, number)))
        beside.append(step())  # one on every rank, whoever's upload is over first
        for outcome in saver.drain(120):
            committed += outcome.committed
            written = max(written, outcome.bytes)
    shard = 3 * sum(cast(Any, parameter)._local_tensor.nbytes for parameter in model.parameters())
    report = {
        "saves": saves,
        "committed": committed,
        "blocked_first": blocked[0],
        "blocked_p50": quantile(blocked[1:], 0.5),
        "blocked_p99": quantile(blocked[1:], 0.99),
        "step_quiet_p50": quantile(quiet, 0.5),
        "step_quiet_p99": quantile(quiet, 0.99),
        "step_uploading_p50": quantile(beside, 0.5),
        "step_uploading_p99": quantile(beside, 0.99),
        "bytes_written": written / shard,
    }
    Path(f"{where}-{rank}.json").write_text(json.dumps(report))
    saver.close()
    dist.destroy_process_group()


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def memory(where: str, megabytes: int, saves: int) -> None:
    """What the rank and its upload process hold while they save, above what a rank holds that trains without."""
    import torch

    from muster.trainer.checkpoint import CheckpointSaver, SaverIdentity
    from muster.words.job import Keep

    model, optimizer = state(megabytes)

    def train() -> None:
        """In place: what an allocator happens to keep would be most of the difference."""
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.999)

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what making the model took is no part of it
    with most_held(alone=True) as before:
        for _ in range(20):
            train()
    saver = CheckpointSaver(SaverIdentity("bench", "bench", 1, None, where, {}, {}, {}), Keep(last=1), {})
    with most_held() as saving:
        saver.prepare(model, optimizer)
        for number in range(1, saves + 1):
            saver.save(train_state(model, optimizer, number), emergency=True)
            train()
            assert all(outcome.committed for outcome in saver.drain(120))
    saver.close()
    shard = 3 * sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"shard": shard, "extra": saving[0] - before[0]}))


@contextmanager
def most_held(alone: bool = False) -> Iterator[list[int]]:
    """The most memory, in bytes, that this process and its children held meanwhile, or it `alone`, looked at every
    10 ms. What two share counts once. Files in the page cache can be given back and are not held."""
    peak, over = [0], threading.Event()

    def anonymous(pid: int) -> int:
        kind = "Anonymous:" if alone else "Pss_Anon:"
        return int(Path(f"/proc/{pid}/smaps_rollup").read_text().split(f"\n{kind}")[1].split()[0]) * 1024

    def look() -> None:
        me = psutil.Process()
        while not over.wait(0.01):
            with suppress(OSError, IndexError):  # a child has just ended
                tree = [me.pid] if alone else [me.pid, *(child.pid for child in me.children(recursive=True))]
                shared = int(Path("/proc/self/status").read_text().split("RssShmem:")[1].split()[0]) * 1024
                peak[0] = max(peak[0], shared + sum(map(anonymous, tree)))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def fall_back(where: str, megabytes: int, files: Path) -> None:
    """Two commits; one bit of the newest is flipped, in the last part that is read; seconds until the older is in."""
    import torch

    from muster.trainer.checkpoint import CheckpointSaver, SaverIdentity, resume
    from muster.words.job import Keep

    model, optimizer = state(megabytes)
    saver = CheckpointSaver(SaverIdentity("bench", "bench", 1, None, where, {}, {}, {}), Keep(last=2), {})
    saver.prepare(model, optimizer)
    for step in (1, 2):
        saver.save(train_state(model, optimizer, step), emergency=True)
        assert all(outcome.committed for outcome in saver.drain(600))
    saver.close()
    (shard,) = (files / "step-00000002").rglob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-1_000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1_000, os.SEEK_END)
        file.write(bytes([byte ^ 4]))
    fresh, fresh_optimizer = state(megabytes)
    said: list[str] = []
    seconds, cpu = timed(lambda: said.append(str(resume(where, 2, fresh, fresh_optimizer, said.append).step)))
    assert said[-1] == "1", said
    assert "do not have the checksum" in said[0], said
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    print(json.dumps({"seconds": seconds, "cpu": cpu}))


def export(where: str, megabytes: int, place: str) -> None:
    """A Llama of so many megabytes of weights: commit it, then write it for `transformers`; seconds, and the most
    memory that took."""
    import torch

    from muster.recipe.architecture import Architecture
    from muster.trainer.checkpoint import CheckpointSaver, SaverIdentity
    from muster.trainer.models.decoder import build
    from muster.words.base import dump
    from muster.words.job import Keep

    layers = max(megabytes * MEGA // (4 * (4 * 1_024 * 1_024 + 3 * 1_024 * 2_816)), 1)
    shape = Architecture(dim=1_024, layers=layers, heads=16, kv_heads=16, ffn_dim=2_816, vocab_size=1_024,
                         max_positions=128, rope_theta=10_000.0, norm_eps=1e-6, tied_head=True)  # fmt: skip
    model = build(shape).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    saver = CheckpointSaver(SaverIdentity("bench", "bench", 1, None, where, {}, dump(shape), {}), Keep(last=1), {})
    saver.save(train_state(model, torch.optim.AdamW(model.parameters()), 1))
    assert all(outcome.committed for outcome in saver.drain(600))
    saver.close()
    export = [sys.executable, "-m", "muster.trainer.convert.export"]
    command = [*export, "--checkpoint", where, "--to", f"{place}/model", "--json"]
    # By a small process: a child's peak begins with the memory of whoever started it.
    watched = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], check=True, stdout=subprocess.PIPE); "
        "print(done.stdout.decode()); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", watched, *command], check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    report, peak = json.loads(done.stdout.splitlines()[0]), int(done.stdout.splitlines()[-1])
    shutil.rmtree(f"{place}/model")
    print(json.dumps({"bytes": report["bytes"], "seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
