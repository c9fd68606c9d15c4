"""Seconds from a launcher's start to the first line of its first rank, beside torchrun on the same script.

    python benchmarks/rank_start.py [--rounds 10] [--ranks 2] [--check]

The script prints a line and ends, so that the launcher's own share is all that is measured; the second column is the
whole, until the launcher has ended. In each round torchrun and Muster's launcher take turns, and who begins alternates.
--check: exit 1 if Muster's launcher is not faster in the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = "print('here', flush=True)\n"
WAYS = ("torchrun", "muster.worker")


def start(way: str, folder: Path, ranks: int) -> tuple[float, float]:
    """Return the seconds until the first line, and until the launcher's end. Raises RuntimeError where it fails."""
    (folder / "work").mkdir(parents=True)
    (folder / "work" / "train.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "PET_"))}
    if way == "torchrun":
        command = ["-m", "torch.distributed.run", "--master-port=0", f"--nproc-per-node={ranks}", "train.py"]
    else:
        command = ["-m", "muster.worker"]
        document = {"program": {"command": ["train.py"]}, "checkpoint": {}}
        environ |= {"MUSTER_CONFIG": json.dumps(document), "MUSTER_WORKER_DIR": str(folder), "MUSTER_JOB_UID": "uid"}
        environ["PET_NPROC_PER_NODE"] = str(ranks)
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder / "work", env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        here = next((time.monotonic() - began for line in process.stdout if b"here" in line), None)
        process.stdout.read()
        if process.wait() or here is None:
            raise RuntimeError(f"{way} ended with exit code {process.returncode}")
        return here, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="muster-rank-start-") as folder:
        for number in range(chosen.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                seconds[way].append(start(way, Path(folder) / f"{way}-{number}", chosen.ranks))
    medians = {}
    for way, pairs in seconds.items():
        here, whole = (sorted(column) for column in zip(*pairs, strict=True))
        medians[way] = statistics.median(here)
        print(
            f"{way:<14} first line {medians[way]:.2f} s ({here[0]:.2f} to {here[-1]:.2f})"
            f"   whole {statistics.median(whole):.2f} s"
        )
    return 1 if chosen.check and medians["muster.worker"] >= medians["torchrun"] else 0


if __name__ == "__main__":
    sys.exit(main())
