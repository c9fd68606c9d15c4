"""How long a job in Kubernetes stands still when a pod of its gang is lost: new pods, to the first new step.

    KUBEBUILDER_ASSETS=… python benchmarks/pod_recovery.py [--kills 20] [--seed 0] [--check]

A real control plane, the chart's CRD and RBAC, and the operator with its own service account. A job of two workers
trains (gloo, FSDP) in pods that a stand-in kubelet runs as processes. At random moments the container of one
is killed, or its pod is deleted by force. Measured from there to the first step of the next attempt, all of whose pods
are new. --check: exit 1 if its p95 is over 30 s.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovery import WORKERS, document, percentile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cluster.controlplane import ControlPlane, missing  # noqa: E402
from tests.cluster.house import House, quick_job  # noqa: E402
from tests.polling import eventually  # noqa: E402

from muster.words.names import STEP_LOG, WorkerId, worker_name  # noqa: E402
from muster.words.signals import StepRecord  # noqa: E402
from muster.words.times import epoch_seconds  # noqa: E402

JOB = "recovery"
SECONDS_MAX = 30.0


@dataclass(frozen=True)
class Recovery:
    """Seconds from the fault: until the next attempt was decided, and until its first step."""

    fault: str
    decided: float
    total: float


def submit(house: House, folder: Path) -> None:
    """The job of recovery.py, in pods."""
    text = "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    (folder / "text.txt").write_text(text)
    spec: Any = document(folder)["spec"]
    parts = {name: spec[name] for name in ("training", "checkpoint", "recovery")}
    house.submit(quick_job(JOB, WORKERS, runtime={"image": "trainer"}, **parts))


def first_step(house: House, attempt: int) -> float:
    """When the attempt's first step was done, once it is."""

    def look() -> float | None:
        pod = house.kubelets.of(worker_name(JOB, WorkerId(attempt, 0)))
        log = pod.folder / "muster" / "worker" / STEP_LOG if pod else None
        lines = log.read_text().splitlines() if log and log.exists() else []
        return StepRecord.model_validate_json(lines[0]).at if lines and lines[0].endswith("}") else None

    return eventually(look, f"the first step of attempt {attempt}\n{house.tail()}", 120)


def lose_a_pod(house: House, attempt: int, dice: random.Random) -> Recovery:
    name = worker_name(JOB, WorkerId(attempt, dice.randrange(WORKERS)))
    pod = house.kubelets.of(name)
    assert pod is not None, f"{name} does not run"
    fault, at = dice.choice(("container killed", "pod deleted")), time.time()
    if fault == "container killed":
        pod.kill_container()
    else:
        house.kubectl("delete", "pod", "-n", "team", name, "--force", "--grace-period=0", "--wait=false")
    stepped = first_step(house, attempt + 1)
    decided = epoch_seconds(house.status(JOB)["attempts"][-1]["createdAt"])
    return Recovery(fault, decided - at, stepped - at)


def measure(house: House, folder: Path, kills: int, dice: random.Random) -> list[Recovery]:
    house.install()
    house.namespace("team")
    for index in range(WORKERS):
        house.node(f"bench-{index}")
    house.start_operator()
    submit(house, folder)
    first_step(house, 1)
    found = []
    for attempt in range(1, kills + 1):
        time.sleep(dice.uniform(0.2, 3.0))
        found.append(lose_a_pod(house, attempt, dice))
        told = found[-1]
        print(f"{attempt:3}  {told.fault:<17} decided {told.decided:5.2f}  first step {told.total:5.2f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if reason := missing():
        print(f"can't measure: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plane = ControlPlane(folder / "plane")
        plane.start()
        house = House(plane, folder)
        try:
            found = measure(house, folder, arguments.kills, random.Random(arguments.seed))
        finally:
            house.close()
            plane.stop()
    totals = [recovery.total for recovery in found]
    p95 = percentile(totals, 0.95)
    print(
        f"{len(totals)} recoveries with new pods: p50 {statistics.median(totals):.2f}, p95 {p95:.2f}, "
        f"max {max(totals):.2f} s; decided after p50 {statistics.median(r.decided for r in found):.2f} s"
    )
    return int(arguments.check and p95 > SECONDS_MAX)


if __name__ == "__main__":
    sys.exit(main())
