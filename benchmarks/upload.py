"""How fast a file goes to the API, beside a raw write of the same bytes to the same disk.

    python benchmarks/upload.py [--megabytes 1000] [--rounds 3] [--folder FOLDER] [--json FILE]

Each round writes the file once by `write` and `fsync`, as a program does that copies it, and sends it once by
`muster.client` over loopback to an API process, until that has it on its disk and its digest is compared. The rounds
alternate, and the medians are compared: an upload is to reach 0.8 of the raw speed. Every byte is hashed on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from muster.client.address import Server
from muster.client.connection import Connection
from muster.client.transfers import FileTransfers

BLOCK_BYTES = 1 << 20
AIM = 0.8


def main() -> None:
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="muster-bench-", dir=given.folder) as name:
        folder = Path(name)
        source = folder / "data.bin"
        _make(source, given.megabytes)
        raw, sent = [], []
        process, url = _start(folder)
        try:
            for number in range(given.rounds):
                raw.append(_write(source, folder / "raw.bin"))
                sent.append(_upload(url, source, f"data-{number}.bin"))
                print(
                    f"round {number + 1}: raw {given.megabytes / raw[-1]:,.0f} MB/s, "
                    f"upload {given.megabytes / sent[-1]:,.0f} MB/s",
                    flush=True,
                )
        finally:
            process.terminate()
            process.wait(60)
    ratio = statistics.median(raw) / statistics.median(sent)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"an upload has {ratio:.2f} of a raw write's speed (aim {AIM}); {os.cpu_count()} processors, load {load}")
    if given.json:
        found = {"raw": raw, "upload": sent, "ratio": ratio, "megabytes": given.megabytes, "load": os.getloadavg()}
        Path(given.json).write_text(json.dumps(found, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk that is measured; left out: the temporary folder's")
    parser.add_argument("--json", help="also write what was found to this file")
    return parser.parse_args()


def _make(path: Path, megabytes: int) -> None:
    """Random bytes, which nothing compresses."""
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1_000_000))


def _write(source: Path, target: Path) -> float:
    began = time.perf_counter()
    with source.open("rb") as reading, target.open("wb") as writing:
        while block := reading.read(BLOCK_BYTES):
            writing.write(block)
        writing.flush()
        os.fsync(writing.fileno())
    took = time.perf_counter() - began
    target.unlink()
    return took


def _upload(url: str, source: Path, name: str) -> float:
    with Connection(Server(url, "the benchmark")) as connection, FileTransfers(connection) as transfers:
        began = time.perf_counter()
        made = transfers.upload(source, "user_data", name=name)
        took = time.perf_counter() - began
        transfers.until_checked(made["id"])
        connection.delete(f"files/{made['id']}")
    return took


def _start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "muster.api", "--state", str(folder / "state"), "--port", "0", "--no-auth"]
    with (folder / "api.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    match = re.search(r"http://[^/\s]+", process.stdout.readline())
    if match is None:
        raise SystemExit((folder / "api.log").read_text())
    return process, match[0]


if __name__ == "__main__":
    main()
