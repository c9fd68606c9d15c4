"""make drill-checkpoint: hundreds of seeded faults against two kinds of real S3 server and a folder, and what became of
the commits.

What is done to each store is listed in troubles.py (`Drill.troubles`); docs/checkpoints.md says which fault is shown
where. The stores are drilled at once: most of a drill is waiting.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tests.drills.checkpoint.dcp import drill_dcp
from tests.drills.checkpoint.faulty_proxy import Plan, faulty_proxy
from tests.drills.checkpoint.gangs import nursery
from tests.drills.checkpoint.scorecard import Scorecard, page
from tests.drills.checkpoint.troubles import Drill
from tests.s3_servers import BUCKET, KEYS, moto_server, rclone_server

from muster.trainer.checkpoint import list_commits

STEPS_KNOWN = 6
DAMAGES = 24  # per store
PR_SET_CHILD_SUBREAPER = 36


def drill(store: str, place: Path, truth: dict[int, Any], seed: int, rounds: int | None) -> Scorecard:
    """One store: every trouble once, or `rounds` of them; then damage."""
    began = time.monotonic()
    with nursery(place / f"{store}.log") as gangs, served(store, place, seed) as (folder, plan, endpoint):
        drilled = Drill(gangs, truth, seed, plan, endpoint)
        troubles = list(drilled.troubles())
        drilled.dice.shuffle(troubles)
        for name, trouble in troubles[:rounds]:
            trouble(f"{folder}/{name}")
        drilled.damage(f"{folder}/damaged", min(DAMAGES, 4 * (rounds or DAMAGES)))
    faults = sum(drilled.score.faults.values())
    print(f"{store} done: {faults} faults, {time.monotonic() - began:.0f} s", flush=True)
    return drilled.score


@contextlib.contextmanager
def served(store: str, place: Path, seed: int) -> Iterator[tuple[str, Plan, str | None]]:
    """Where jobs' folders lie, the plan of the proxy before them, and its address."""
    if store == "folder":
        yield (place / "folder").as_uri(), Plan(), None
        return
    # moto's server checks no body, so the proxy checks CRC-32 for it, as AWS does.
    plan = Plan(seed=seed, checks_crc32=store == "moto")
    kind = rclone_server(place / "rclone") if store == "rclone" else moto_server()
    with kind as server, faulty_proxy(server.url, plan) as url:
        yield f"s3://{BUCKET}", plan, url


def truth_of(place: Path) -> dict[int, Any]:
    """The digest of the state after each step: of a run without faults, loaded from its commits one by one."""
    known: dict[int, Any] = {}
    uri = (place / "truth").as_uri()
    with nursery(place / "truth.log") as gangs:
        for last in range(3, STEPS_KNOWN + 1, 3):
            more = {"resume": last - 3} if last > 3 else {}
            gangs.live(do="train", world=2, folder=uri, steps=3, attempt=last, **more)
            said = gangs.live(do="check", world=1, folder=uri, steps=list(list_commits(uri)))
            known |= {note["step"]: note["digest"] for note in said.said("step")}
    return known


@contextlib.contextmanager
def ended_with_all(place: Path) -> Iterator[None]:
    """Whoever ends the drill early (SIGTERM, Ctrl-C) finds no process of it and no file: threads would wait for their
    gangs, and upload processes outlive their ranks, so all that descend from here are killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans stay ours, to be found

    def end(number: int, _: object) -> None:
        kill_descendants()
        shutil.rmtree(place, ignore_errors=True)
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_descendants() -> None:
    while children := psutil.Process().children(recursive=True):  # one may have forked meanwhile
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, help="troubles per store (default: all)")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--store", choices=("folder", "rclone", "moto"), action="append", help="only this one")
    arguments.add_argument("--no-dcp", action="store_true", help="leave out torch.distributed.checkpoint")
    arguments.add_argument("--write", type=Path, help="the scorecard's file")
    chosen = arguments.parse_args()
    os.environ.update(KEYS)
    began, score = time.monotonic(), Scorecard()
    with tempfile.TemporaryDirectory(prefix="muster-drill-") as temporary, contextlib.ExitStack() as interrupted:
        place = Path(temporary)
        interrupted.enter_context(ended_with_all(place))
        stores = chosen.store or ["folder", "rclone", "moto"]
        one = partial(drill, place=place, truth=truth_of(place), rounds=chosen.rounds)
        with ThreadPoolExecutor(len(stores)) as threads:
            running = [threads.submit(one, store, seed=chosen.seed + n) for n, store in enumerate(stores)]
            for drilled in running:
                score.add(drilled.result())
        score.seconds = time.monotonic() - began
        print(score.text(f"Muster, seed {chosen.seed}"), flush=True)
        if not chosen.no_dcp:
            began, other = time.monotonic(), Scorecard()
            with nursery(place / "dcp.log") as gangs:
                drill_dcp(gangs, place / "dcp", other, chosen.seed, score)
            other.seconds = time.monotonic() - began
            print(other.text("torch.distributed.checkpoint, in a folder"))
            if chosen.write:
                chosen.write.write_text(page(f"make drill-checkpoint ARGS='--write {chosen.write}'", score, other))
    return 0 if score.well else 1


if __name__ == "__main__":
    sys.exit(main())
