"""make drill-spot: notices from mock metadata services against real training, with a store that refuses one in ten.

    python -m tests.drills.spot.drill [--notices 100] [--refused 0.1] [--results FILE] [--write docs/scorecard-spot.md]

--results: a JSON file to which this run is added; table and scorecard are then of all that it holds.
Exit status 1 when the goal is missed: a verified commit by T+60 s at p99, no retry consumed, training elsewhere.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.drills.spot.house import PATIENCE_SECONDS, Market, market
from tests.drills.spot.scorecard import Outcome, Scorecard
from tests.polling import eventually

from muster.storage.opening import open_store
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.verify import verify
from muster.words.signals import Cause
from muster.words.status import JobStatus, Phase

GANGS = (2, 1)  # workers of each job; they are struck independently of each other
SPARE_NODES = 2
STEPS_MIN = 3  # of an attempt, before it is struck
REPEATS = 8  # of a check by this process, whose requests are refused like everybody's


class Job:
    def __init__(self, place: Market, name: str, workers: int, dice: random.Random) -> None:
        self.place, self.name, self.workers, self.dice = place, name, workers, dice
        self.uid = place.submit(name, workers)

    def strike(self) -> Outcome:
        """One notice for one of its nodes, while it trains."""
        place, uid = self.place, self.uid
        status = eventually(self.trains, f"{self.name} to train", PATIENCE_SECONDS)
        # Anywhere between two commits.
        target = len(place.steps(uid, status.attempt)) + self.dice.randint(0, 30)
        eventually(
            lambda: len(place.steps(uid, status.attempt)) >= target, f"{self.name} to train on", PATIENCE_SECONDS
        )
        node = self.dice.choice(status.gang.nodes)
        at = place.interrupt(node)
        told = eventually(lambda: self.left(status.attempt), f"anybody to hear of the notice for {node}")
        after = eventually(lambda: self.trains(status.attempt + 1), f"{self.name} to train again", PATIENCE_SECONDS)
        place.replace(node)
        last = max(record.step for record in place.steps(uid, status.attempt))
        committed_at, verified = self.commit_of(status.attempt, after.resume_step)
        first = next(record for record in place.steps(uid, after.attempt) if record.step > after.resume_step)
        return Outcome(
            job=self.name,
            workers=self.workers,
            told=told - at,
            committed=committed_at - at,
            verified=verified,
            back=first.at - at,
            lost_steps=last - after.resume_step,
            elsewhere=node not in after.gang.nodes,
            retries=len(after.restarts.recent) + (after.restarts.by_cause.keys() != {Cause.PREEMPTION}),
        )

    def trains(self, attempt: int = 1) -> JobStatus | None:
        status = self.place.house.status(self.uid)
        if status.phase.terminal:
            raise RuntimeError(f"{self.name} is {status.phase}: {status.because}")
        new = [record for record in self.place.steps(self.uid, status.attempt) if record.step > status.resume_step]
        ready = status.attempt >= attempt and status.phase is Phase.RUNNING and len(new) >= STEPS_MIN
        return status if ready else None

    def left(self, attempt: int) -> float | None:
        """When the operator wrote that this attempt ends."""
        status = self.place.house.status(self.uid)
        return time.time() if status.phase is Phase.RESTARTING or status.attempt > attempt else None

    def commit_of(self, attempt: int, step: int) -> tuple[float, bool]:
        """When the commit from which the next attempt resumed was published, and whether it is whole and of this
        attempt."""
        folder = f"s3://checkpoints/drill/{self.uid}"
        with LOCK, self.place.as_us():
            store = open_store(folder)
            for repeat in range(REPEATS):
                try:
                    commit = commit_in(store, step)
                    verify(store, commit)
                    return commit.committed_at, commit.attempt == attempt
                except Exception as error:
                    if repeat == REPEATS - 1:
                        print(f"{self.name}: step {step} can't be verified: {error}", file=sys.stderr, flush=True)
        return time.time(), False


LOCK = threading.Lock()  # the store is told its keys by the environment, of which a process has one


def drill(notices: int, refused: float, root: Path, seed: int = 0, score: Scorecard | None = None) -> Scorecard:
    """score: filled as it goes, so that what was seen before an error is not lost."""
    began = time.monotonic()
    score = Scorecard([]) if score is None else score
    with market(root, sum(GANGS) + SPARE_NODES, refused, seed) as place:
        jobs = [
            Job(place, f"spot-{index}", workers, random.Random(seed + index)) for index, workers in enumerate(GANGS)
        ]
        shares = [notices // len(jobs) + (index < notices % len(jobs)) for index in range(len(jobs))]
        errors: list[Exception] = []

        def strike(job: Job, times: int) -> None:
            try:
                for _ in range(times):
                    outcome = job.strike()
                    score.outcomes.append(outcome)
                    score.requests, score.refused = place.plan.done["requests"], place.plan.done["slow_down"]
                    score.seconds = time.monotonic() - began
                    print(f"{len(score.outcomes):4} {line(outcome)}", flush=True)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=strike, args=pair, daemon=True) for pair in zip(jobs, shares, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(f"{errors[0]}\n{place.house.log[-3000:]}") from errors[0]
    return score


def line(outcome: Outcome) -> str:
    return (
        f"{outcome.job} of {outcome.workers}: told {outcome.told:5.1f} s, committed {outcome.committed:5.1f} s, "
        f"back {outcome.back:5.1f} s, lost {outcome.lost_steps} steps{'' if outcome.good else '  NOT GOOD'}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make drill-spot", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--notices", type=int, default=100)
    parser.add_argument("--refused", type=float, default=0.1, help="share of requests to the store answered with 503")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="a file that adds up several runs")
    parser.add_argument("--write", type=Path, help="the scorecard's file")
    arguments = parser.parse_args(words)
    before, now = Scorecard.read(arguments.results), Scorecard([])
    try:
        with tempfile.TemporaryDirectory(prefix="muster-spot-") as folder:
            drill(arguments.notices, arguments.refused, Path(folder), arguments.seed + len(before.outcomes), score=now)
    except KeyboardInterrupt:
        print(f"stopped after {len(now.outcomes)} notices", file=sys.stderr)
    finally:
        score = before + now
        if arguments.results:
            score.write(arguments.results)
    if not score.outcomes:
        return 1
    print(f"\n{score.table()}\n\n{score.summary()}")
    if arguments.write:
        arguments.write.write_text(score.page())
    for fault in score.faults():
        print(fault, file=sys.stderr)
    return 0 if score.good else 1


if __name__ == "__main__":
    sys.exit(main())
