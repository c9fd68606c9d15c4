"""Seconds to a program's first step by `muster run`, beside torchrun on the same script.

    python benchmarks/first_step.py [--rounds 3] [--check]

The script is examples/programs/plain.py with a single step, after which it prints a line; each way is timed from its
command to that line in its output. In each round, in turns: torchrun; `muster run` with a platform that is up already;
and both commands of an empty machine, `muster up` on a fresh folder and then `muster run`.
--check: exit 1 if `muster run` takes more than 10 s longer than torchrun in the median.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "programs" / "plain.py"
BOUND_SECONDS = 10.0
LINE = "step 1: weights"
MUSTER = [sys.executable, "-m", "muster.cli"]
WAYS = ("torchrun", "muster run", "muster up, muster run")


def seconds_to_step(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Return the seconds until the line of the first step. Raises RuntimeError where it does not come."""
    began, output = time.monotonic(), []
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if LINE in line:
                took = time.monotonic() - began
                process.wait()
                return took
    raise RuntimeError(f"{' '.join(command)} came to no step:\n{''.join(output)[-3000:]}")


@contextmanager
def platform(root: Path) -> Iterator[dict[str, str]]:
    """Start `muster up` on a fresh folder, and yield the variables by which the command line finds it."""
    state = str(root / "state")
    environment = {**os.environ, "HOME": str(root), "XDG_CONFIG_HOME": str(root / "config"), "MUSTER_STATE": state}
    with subprocess.Popen(
        [*MUSTER, "up", "--port", "0", "--json"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield {**environment, "MUSTER_SERVER": json.loads(line)["url"]}
        finally:
            process.terminate()
            process.wait(60)


def one_round(root: Path) -> tuple[float, float, float]:
    """Return the seconds of each of the ways."""
    source = root / "source"
    source.mkdir(parents=True)
    (source / "train.py").write_text(SCRIPT.read_text().replace('os.environ.get("STEPS", "60")', '"1"'))
    alone = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "train.py"]
    bare = seconds_to_step(alone, source, dict(os.environ))
    (source / "state.pt").unlink(missing_ok=True)
    run = [*MUSTER, "run", "--", "python", "train.py"]
    began = time.monotonic()
    with platform(root) as environment:
        started = time.monotonic() - began
        first = seconds_to_step(run, source, environment)
        second = seconds_to_step(run, source, environment)
    return bare, second, started + first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    rounds = []
    for number in range(chosen.rounds):
        with tempfile.TemporaryDirectory(prefix="muster-first-step-") as folder:
            rounds.append(one_round(Path(folder) / str(number)))
            print("  ".join(f"{way}: {took:.1f} s" for way, took in zip(WAYS, rounds[-1], strict=True)), flush=True)
    more = [statistics.median(each[way] - each[0] for each in rounds) for way in (1, 2)]
    times = [statistics.median(each[way] / each[0] for each in rounds) for way in (1, 2)]
    for way, seconds, ratio in zip(("with the platform up", "from an empty machine"), more, times, strict=True):
        print(f"{way}: {seconds:+.1f} s beside torchrun, x {ratio:.2f} (medians of {len(rounds)} rounds)")
    return 1 if chosen.check and more[0] > BOUND_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
