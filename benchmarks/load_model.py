"""A model's folder in S3 into two ranks, beside raw clients that fetch the same files, in one run on one server.

    python benchmarks/load_model.py [--layers 6] [--repeat 3] [--check] [--json FILE]

Muster's two ranks each fill their shard (FSDP), with the CRC-32 of every byte and a look for NaN; the clock runs from
where both begin to where the later one ends. A raw client fetches all files into memory, where they stay, in two
processes that take half of them each (or in one, where it is a program of its own), and checks nothing. All take turns
on the same rclone server over loopback. --check ends with 1 where Muster's speed is less than 0.8 of the best client's.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.loading_rank import load_on_two_ranks, write_large_model  # noqa: E402
from tests.s3_servers import BUCKET, Missing, rclone_server, s5cmd  # noqa: E402

AIM = 0.8
Taken = tuple[float, float]  # seconds by the clock, and of the CPU
# Fetches some of the files from a server, and calls what it is given when it has its client.
Work = Callable[[list[str], str, Callable[[], None]], None]
BLOCK = 8 << 20  # of a ranged request, as Muster's
TRAINING = {
    "data": {"train": [{"source": "unread"}], "sequenceLength": 32},
    "model": {"source": f"s3://{BUCKET}/model"},
    "adapter": {"rank": 1, "targets": ["q_proj"]},  # what is frozen keeps the folder's dtype
    "batch": {"tokensPerStep": 64, "microBatch": 1},
    "parallel": {"shard": "fsdp"},
    "length": {"steps": 1},
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--layers", type=int, default=6, help="of the model; 6 make 1.1 GB, 14 make 2.2 GB")
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--check", action="store_true", help="end with 1 where the aim is missed")
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as place, rclone_server(Path(place)) as server:
        folder = Path(place) / BUCKET / "model"
        total = write_large_model(folder, chosen.layers)
        environment = server.environment()
        os.environ.update(environment)
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        peers: dict[str, Callable[[], Taken]] = {
            "muster": lambda: with_muster(environment),
            "boto3's transfers": lambda: in_two_processes(transfers, files, server.url),
            "boto3's ranges": lambda: in_two_processes(ranges, files, server.url),
            "s5cmd": lambda: with_s5cmd(place, server.url),
        }
        found = measured(peers, chosen.repeat, total)
    middle = {peer: [statistics.median(each) for each in zip(*turns, strict=True)] for peer, turns in found.items()}
    speeds = {peer: total / 1e6 / seconds for peer, (seconds, _) in middle.items()}
    best = max(speed for peer, speed in speeds.items() if peer != "muster")
    ratio = speeds["muster"] / best
    print(f"{total / 1e9:.2f} GB from S3 into two ranks, {os.cpu_count()} cores, medians of {chosen.repeat}:")
    for peer, speed in speeds.items():
        print(f"  {peer:18} {speed:6.0f} MB/s {middle[peer][1]:6.2f} s of CPU")
    print(f"Muster's speed is {ratio:.2f} of the best raw client's (aim: at least {AIM})")
    if chosen.json:
        chosen.json.write_text(json.dumps({"bytes": total, "seconds and CPU": found, "ratio": ratio}, indent=1))
    return int(chosen.check and ratio < AIM)


def measured(peers: dict[str, Callable[[], Taken]], repeat: int, total: int) -> dict[str, list[Taken]]:
    """What each turn took. The peers take turns, so that a slow minute of the machine hits all of them."""
    found: dict[str, list[Taken]] = {}
    for _ in range(repeat):
        for peer, run in peers.items():
            try:
                taken = run()
            except Missing as missing:
                print(f"  {peer}: not measured: {missing}", flush=True)
                continue
            found.setdefault(peer, []).append(taken)
            seconds, cpu = taken
            print(f"  {peer:18} {seconds:6.2f} s {total / 1e6 / seconds:6.0f} MB/s {cpu:6.2f} s of CPU", flush=True)
    return found


def with_muster(environment: dict[str, str]) -> Taken:
    ranks = load_on_two_ranks(TRAINING, environment)
    return max(rank["seconds"] for rank in ranks), sum(rank["cpu"] for rank in ranks)


def in_two_processes(work: Work, files: list[str], url: str) -> Taken:
    """From where both have their client to where the later one has all its files."""
    fork = multiprocessing.get_context("spawn")
    start, spent = fork.Barrier(3), fork.SimpleQueue()
    workers = [fork.Process(target=timed, args=(work, files[half::2], url, start, spent)) for half in range(2)]
    for worker in workers:
        worker.start()
    start.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    assert all(worker.exitcode == 0 for worker in workers)
    return seconds, sum(spent.get() for _ in workers)


def timed(work: Work, files: list[str], url: str, start: Any, spent: Any) -> None:
    """One of the two: works, and tells the seconds of CPU that it took from the start on."""
    began = [0.0]

    def begin() -> None:
        start.wait()
        began[0] = time.process_time()

    work(files, url, begin)
    spent.put(time.process_time() - began[0])


def transfers(files: list[str], url: str, begin: Callable[[], None]) -> None:
    """boto3's own transfer manager, into memory."""
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=url)
    sizes = {name: client.head_object(Bucket=BUCKET, Key=f"model/{name}")["ContentLength"] for name in files}
    config = TransferConfig(max_concurrency=8, multipart_chunksize=BLOCK)
    begin()
    for name in files:
        with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as into:
            client.download_fileobj(BUCKET, f"model/{name}", into, Config=config)
            assert into.seek(0, os.SEEK_END) == sizes[name]


def ranges(files: list[str], url: str, begin: Callable[[], None]) -> None:
    """Ranged requests from four threads, each straight from the socket into its place in memory."""
    import boto3
    from botocore.config import Config

    plain = Config(response_checksum_validation="when_required", max_pool_connections=8)
    client = boto3.client("s3", endpoint_url=url, config=plain)
    sizes = {name: client.head_object(Bucket=BUCKET, Key=f"model/{name}")["ContentLength"] for name in files}
    kept = {name: mmap.mmap(-1, size) for name, size in sizes.items()}
    blocks = [(name, at, min(at + BLOCK, size)) for name, size in sizes.items() for at in range(0, size, BLOCK)]

    def get(block: tuple[str, int, int]) -> int:
        name, first, end = block
        answer = client.get_object(Bucket=BUCKET, Key=f"model/{name}", Range=f"bytes={first}-{end - 1}")
        into, done = memoryview(kept[name])[first:end], 0
        while done < len(into):
            done += answer["Body"]._raw_stream._fp.readinto(into[done:]) or len(into)
        answer["Body"]._raw_stream.release_conn()
        return done

    begin()
    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(get, blocks)) == sum(sizes.values())


def with_s5cmd(place: str, url: str) -> Taken:
    """s5cmd, into memory where there is a folder of it."""
    program = s5cmd()
    into = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else place))
    try:
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        copy = [str(program), "--endpoint-url", url, "cp", "-c", "8", "-p", "8", f"s3://{BUCKET}/model/*", f"{into}/"]
        subprocess.run(copy, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - began, cpu
    finally:
        shutil.rmtree(into)


if __name__ == "__main__":
    sys.exit(main())
