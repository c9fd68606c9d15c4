"""What the node agent costs: memory and processor time over a minute, on a busy node.

    python benchmarks/agent.py [--seconds 60] [--gpus 8] [--workers 8]

A metadata service that is polled each second, a kernel log that is followed, eight workers that ask for notices each
second, a scrape every fifteen. The GPUs are a stand-in behind NVML's names, so the driver's own time is not in it. Exit
status 1 beyond 60 MB or 1 % of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.polling import eventually  # noqa: E402
from tests.unit.agent.mock_imds import mock_imds  # noqa: E402

MEGABYTES_MAX, SHARE_MAX = 60.0, 0.01
SCRAPE_SECONDS = 15.0
STAND_IN = """
import sys
sys.path.insert(0, {root!r})
from tests.unit.agent import fake_nvml
sys.modules[__name__] = fake_nvml.FakeNvml({gpus})
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-agent-") as folder, mock_imds() as imds:
        root = Path(folder)
        (root / "pynvml.py").write_text(STAND_IN.format(root=str(ROOT), gpus=arguments.gpus))
        kernel_log = root / "kmsg"
        os.mkfifo(kernel_log)
        process, port = start(root, kernel_log, imds.address)
        stop = threading.Event()
        try:
            page = lambda name: f"http://127.0.0.1:{port}/{name}"  # noqa: E731
            every(1.0, page("notices"), stop, arguments.workers)
            every(SCRAPE_SECONDS, page("metrics"), stop)
            watched = psutil.Process(process.pid)
            stop.wait(5.0)  # beyond the start
            result = measure(watched, arguments.seconds, stop.wait)
            result["imdsRequests"] = sum(imds.asked.values())
            result["gpuMetrics"] = fetch(page("metrics")).count(b"muster_agent_gpu_temperature_celsius{")
        finally:
            stop.set()
            process.terminate()
            process.wait(20)
    print(json.dumps(result, indent=1))
    return 0 if result["megabytes"] <= MEGABYTES_MAX and result["coreShare"] <= SHARE_MAX else 1


def start(root: Path, kernel_log: Path, imds: str) -> tuple[subprocess.Popen[bytes], int]:
    """The agent, and the port on which it answers."""
    log = root / "agent.log"
    command = ["--node", "n", "--host", "127.0.0.1", "--port", "0", "--imds", imds, "--kernel-log", str(kernel_log)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "muster.agent", *command, "--folder", str(root / "notices")],
            env=os.environ | {"PYTHONPATH": str(root)},
            stderr=file,
        )

    def port() -> int:
        line = next((line for line in log.read_text().splitlines() if "watching: " in line), "")
        return int(json.loads(line.partition("watching: ")[2])["port"]) if line else 0

    return process, eventually(port, "the agent to listen")


def every(seconds: float, address: str, stop: threading.Event, askers: int = 1) -> None:
    def ask() -> None:
        while not stop.wait(seconds):
            fetch(address)

    for _ in range(askers):
        threading.Thread(target=ask, daemon=True).start()


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=10) as reply:
        return bytes(reply.read())


def measure(process: psutil.Process, seconds: float, wait: Callable[[float], object]) -> dict[str, float]:
    began, before = time.monotonic(), process.cpu_times()
    peak = 0
    while time.monotonic() - began < seconds:
        wait(1.0)
        peak = max(peak, process.memory_info().rss)
    took, after = time.monotonic() - began, process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return {
        "seconds": round(took, 1),
        "megabytes": round(peak / 1e6, 1),
        "coreShare": round(used / took, 4),
        "threads": process.num_threads(),
    }


if __name__ == "__main__":
    sys.exit(main())
