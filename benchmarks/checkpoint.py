"""Checkpoints against the field, in one run on one server: raw clients (the limit), torch.distributed.checkpoint,
Muster.

    python benchmarks/checkpoint.py [--megabytes 512] [--repeat 3] [--json FILE]

Peers save and load the same bytes, one rank, on the same rclone S3 server over loopback and in the same folder; each
runs in a process of its own, in turns. s3fs pins an older botocore, so it is installed into a folder of its own.
Then two ranks of 256 MB save while they train: seconds that training was blocked, bytes, and what the upload costs
the steps. One rank saves: the memory that takes. A commit of 1 GB is damaged: seconds until the one before it is
loaded. And models are exported: the most memory that takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.s3_servers import BUCKET, TOOLS, Missing, rclone_server, s5cmd  # noqa: E402

REMOTE = ("boto3", "boto3-md5", "s5cmd", "muster", "dcp-fsspec")
LOCAL = ("copy", "muster", "dcp-sync", "dcp-async")
RAW = ("boto3", "boto3-md5", "s5cmd")
CHECKS = {
    "boto3": "sends CRC-32 and SHA-256, which this server ignores; checks nothing on loading",
    "boto3-md5": "Content-MD5 per part, checked by the server; CRC-32 per part compared on loading",
    "s5cmd": "sends SHA-256, which this server ignores; checks nothing on loading",
    "muster": "MD5 per part, by the server's ETag; CRC-32 per 16 MiB compared on loading",
    "dcp-fsspec": "sends SHA-256, which this server ignores; checks nothing on loading",
}
S3FS = "s3fs==2025.9.0"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--megabytes", type=int, default=512)
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--saves", type=int, default=51, help="saves of each rank while training")
    parts = ("s3", "folder", "training", "memory", "fall-back", "export")
    arguments.add_argument("--only", choices=parts, help="one part")
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    results: dict[str, Any] = {"megabytes": chosen.megabytes, "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as place:
        if chosen.only in (None, "s3"):
            with rclone_server(Path(place) / "rclone") as server:
                results["s3"] = compare(REMOTE, f"s3://{BUCKET}", server.environment(), place, chosen)
        if chosen.only in (None, "folder"):
            results["folder"] = compare(LOCAL, f"{place}/folder", {}, place, chosen)
        if chosen.only in (None, "training"):
            results["training"] = training(f"{place}/training", chosen)
        if chosen.only in (None, "memory"):
            results["memory"] = memory(place)
        if chosen.only in (None, "fall-back"):
            results["fall_back"] = fall_backs(place)
        if chosen.only in (None, "export"):
            results["export"] = exports(place)
    print(table(results))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))
    return 0


def compare(
    peers: tuple[str, ...], where: str, environment: dict[str, str], place: str, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Median MB/s of each peer's save and load. Peers take turns, so that a slow minute of the machine hits all."""
    runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    skipped: dict[str, str] = {}
    for turn in range(chosen.repeat):
        for peer in peers:
            if peer not in skipped:
                try:
                    runs[peer].append(one(peer, f"{where}/{peer}-{turn}", environment, chosen.megabytes, place))
                except Missing as missing:
                    skipped[peer] = str(missing)
    medians = {
        peer: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for peer, found in runs.items()
        if found
    }
    return {"median": medians, "runs": runs, "skipped": skipped}


def one(peer: str, where: str, environment: dict[str, str], megabytes: int, place: str) -> dict[str, float]:
    extra = {"S5CMD": str(s5cmd())} if peer == "s5cmd" else {}
    path = [str(ROOT)]
    if peer == "dcp-fsspec":
        path.insert(0, str(s3fs()))
    env = {**os.environ, **environment, **extra, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("checkpoint_peers.py"))]
    done = subprocess.run(
        [*command, peer, where, str(megabytes), place], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(f"{peer}: {(done.stderr.strip().splitlines() or ['failed without a word'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {where.split(':')[0][:2]:2} {row(peer, found)}", flush=True)
    return found


def row(peer: str, found: dict[str, float]) -> str:
    ways = (f"{way} {found[way]:6.0f} MB/s, {found[f'{way}_cpu']:5.2f} s CPU" for way in ("save", "load"))
    return f"{peer:12} {'   '.join(ways)}"


def s3fs() -> Path:
    folder = TOOLS / "s3fs"
    if not folder.exists():
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), S3FS],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise Missing(f"s3fs: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def training(where: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Two ranks of 256 MB each that train and save; the figures are the worse rank's."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("checkpoint_peers.py"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, script, "training", where, "256", str(chosen.saves)], env=env, check=True, capture_output=True
    )
    ranks = [json.loads(Path(f"{where}-{rank}.json").read_text()) for rank in range(2)]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def memory(place: str) -> dict[str, dict[str, float]]:
    """Of three saves, by store and size of the shard."""
    found = {}
    with rclone_server(Path(place) / "rclone-memory") as server:
        for size in (256, 512):
            for store, where in (("folder", f"{place}/memory"), ("s3", f"s3://{BUCKET}/memory")):
                found[f"{store}, {size} MB"] = alone(server.environment(), "memory", f"{where}-{size}", str(size), "3")
    return found


def fall_backs(place: str) -> dict[str, dict[str, float]]:
    """At 1 GB, in a folder and on the server; files are in the page cache, as they are after a restart."""
    folder = Path(place) / "fall-back"
    found = {"folder": alone({}, "fall-back", folder.as_uri(), "1000", str(folder))}
    with rclone_server(Path(place) / "rclone-fall-back") as server:
        files = Path(place) / "rclone-fall-back" / BUCKET / "fall-back"
        found["s3"] = alone(server.environment(), "fall-back", f"s3://{BUCKET}/fall-back", "1000", str(files))
    return found


def exports(place: str) -> list[dict[str, float]]:
    """Of models of several sizes, from the server."""
    with rclone_server(Path(place) / "rclone-export") as server:
        where = f"s3://{BUCKET}/export"
        return [alone(server.environment(), "export", f"{where}-{size}", str(size), place) for size in (250, 1_000)]


def alone(environment: dict[str, str], *order: str) -> dict[str, float]:
    """What a process of its own says of one order."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("checkpoint_peers.py")), *order]
    env = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, Any]) -> str:
    lines = [f"{results['megabytes']} MB, one rank, {results['cpus']} cores; medians, MB/s"]
    for place in ("s3", "folder"):
        for peer, found in results.get(place, {"median": {}})["median"].items():
            lines.append(f"  {place:7} {row(peer, found)}")
        for peer, why in results.get(place, {"skipped": {}})["skipped"].items():
            lines.append(f"  {place:7} {peer:12} not measured: {why}")
    if "s3" in results:
        lines += [f"  {peer:12} {words}" for peer, words in CHECKS.items()]
        lines += ratios(results["s3"]["median"])
    if "training" in results:
        lines += training_lines(results["training"])
    for kind, found in results.get("memory", {}).items():
        extra, shard = found["extra"], found["shard"]
        lines.append(f"extra memory, {kind}: {extra / shard:.3f} × the shard, {(extra - shard) / 1e6:.0f} MB beside it")
    for place, found in results.get("fall_back", {}).items():
        lines.append(f"fall-back at 1 GB, {place}: {found['seconds']:.2f} s, {found['cpu']:.2f} s CPU")
    for found in results.get("export", ()):
        megabytes = found["bytes"] / 1e6
        lines.append(
            f"export of {megabytes:.0f} MB: {found['seconds']:.1f} s, {found['peak_bytes'] / 1e6:.0f} MB of memory"
        )
    return "\n".join(lines)


def ratios(s3: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    raw = [found for peer, found in s3.items() if peer in RAW]
    for way in ("save", "load"):
        if "muster" in s3 and raw:
            best = max(found[way] for found in raw)
            lines.append(f"  Muster's {way} is {s3['muster'][way] / best:.2f} × the best raw client's")
        if "muster" in s3 and "boto3-md5" in s3:
            lines.append(
                f"  Muster's {way} is {s3['muster'][way] / s3['boto3-md5'][way]:.2f} × boto3's that checks as much"
            )
        if "muster" in s3 and "dcp-fsspec" in s3:
            lines.append(f"  Muster's {way} is {s3['muster'][way] / s3['dcp-fsspec'][way]:.2f} × DCP over s3fs")
    return lines


def training_lines(t: dict[str, float]) -> list[str]:
    first, middle, last = (1e3 * t[f"blocked_{which}"] for which in ("first", "p50", "p99"))
    return [
        f"while training, 2 ranks × 256 MB, {t['saves']:.0f} saves, {t['committed']:.0f} committed",
        f"  blocked p50 {middle:.0f} ms, p99 {last:.0f} ms; the first save {first:.0f} ms",
        *(
            f"  step {which} {1e3 * t[f'step_quiet_{which}']:.1f} ms without an upload, "
            f"{1e3 * t[f'step_uploading_{which}']:.1f} ms beside one"
            for which in ("p50", "p99")
        ),
        f"  bytes written {t['bytes_written']:.4f} × the unique bytes",
    ]


if __name__ == "__main__":
    sys.exit(main())
