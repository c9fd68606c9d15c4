"""make drill-checkpoint: hundreds of seeded faults against a real S3 server and a folder, and what became of the
commits.

Training is deterministic, so the state after step n is known beforehand: a commit of step n that loads anything else
is a lie, and so is a save that claims success without a commit that loads.
"""

import argparse
import contextlib
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.drills.checkpoint.damage import damage
from tests.drills.checkpoint.dcp import drill_dcp
from tests.drills.checkpoint.faulty_proxy import FAULTS, Plan, faulty_proxy
from tests.drills.checkpoint.gangs import Life, Meeting, Nursery, nursery
from tests.drills.checkpoint.scorecard import Scorecard
from tests.s3_servers import BUCKET, S3Server, moto_server, rclone_server

from muster.trainer.checkpoint.commits import list_commits

STEPS_KNOWN = 12
REFUSALS = (
    (403, "AccessDenied"),
    (404, "NoSuchBucket"),
    (400, "ExpiredToken"),
    (403, "RequestTimeTooSkewed"),
    (400, "AuthorizationHeaderMalformed"),
)


class Drill:
    """One store (a folder, or a server behind a faulty proxy) and the lives that are lived on it."""

    def __init__(self, nursery: Nursery, truth: dict[int, Any], score: Scorecard, seed: int) -> None:
        self.nursery, self.truth, self.score, self.dice = nursery, truth, score, random.Random(seed)
        self.environment: dict[str, str] = {}
        self.plan = Plan()
        self.rounds = 0

    def train(self, folder: str, steps: int = 2, meddle: Callable[[Meeting], None] | None = None, **more: Any) -> Life:
        life = self.nursery.live(
            meddle,
            do="train",
            world=more.pop("world", 2),
            folder=folder,
            steps=steps,
            environment=self.environment,
            **more,
        )
        for note in life.said("resumed"):
            self.score.resumed += 1
            if note["digest"] != self.truth[note["resumed"]]:
                self.score.lies.append(f"{folder}: resumed at step {note['resumed']} with another state")
        return life

    def judge(self, folder: str, *lives: Life) -> None:
        """With the faults over: every commit must load as it was, and every claimed success must be among them."""
        outcomes = [note for life in lives for rank in range(len(life.notes)) for note in life.said("outcome", rank)]
        self.score.saves += sum(len(life.said("saving")) for life in lives)
        claimed = {note["outcome"] for note in outcomes if note["committed"]}
        self.score.committed += len(claimed)
        self.score.failed_and_said_so += len({n["outcome"] for n in outcomes if not n["committed"]} - claimed)
        there = self.commits(folder)
        # Retention keeps the last three, so older claims may be gone by now.
        for step in sorted(claimed)[-3:]:
            if step not in there and step >= min(there, default=0):
                self.score.lies.append(f"{folder}: step {step} was called committed, and there is no such commit")
        self.load_all(folder, there)

    def load_all(self, folder: str, steps: list[int]) -> None:
        life = self.nursery.live(do="check", world=1, folder=folder, steps=steps, environment=self.environment)
        for note in life.said("step"):
            self.score.loads += 1
            if note.get("digest") != self.truth[note["step"]]:
                self.score.unloadable.append(f"{folder} step {note['step']}: {note.get('error', 'another state')}")

    def commits(self, folder: str) -> list[int]:
        with self.as_us():
            return list(list_commits(folder))

    @contextlib.contextmanager
    def as_us(self):  # type: ignore[no-untyped-def]
        import os

        old = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(old)

    # --- one kind of round each ---

    def storm(self, folder: str) -> None:
        """Faults on any request while a gang saves; then a second attempt resumes, still in the storm."""
        before = dict(self.plan.done)
        self.plan.rates = {fault: self.dice.uniform(0.02, 0.15) for fault in FAULTS}
        first = self.train(folder, steps=3)
        second = self.train(folder, steps=2, attempt=2, resume=99)
        self.plan.rates = {}
        for fault in FAULTS:
            self.score.faults[fault] += self.plan.done[fault] - before.get(fault, 0)
        self.judge(folder, first, second)

    def outage(self, folder: str) -> None:
        """The store is gone in the middle of a save, for longer than the retries last or for less."""
        away = self.dice.choice([0.3, 4.0])
        at = self.plan.done["requests"] + self.dice.randint(4, 14)

        def leave(meeting: Meeting) -> None:
            self.plan.gone = True
            meeting.over.wait(away)
            self.plan.gone = False

        life = self.train(folder, 3, lambda meeting: leave(meeting) if self.request(meeting, at) else None)
        self.plan.gone = False
        self.score.faults["store gone"] += 1
        self.judge(folder, life)

    def refusal(self, folder: str) -> None:
        """From some request on, the store refuses: credentials, permissions, bucket, clock, region."""
        at = self.plan.done["requests"] + self.dice.randint(2, 16)

        def refuse(meeting: Meeting) -> None:
            if self.request(meeting, at):
                self.plan.refuse_with = self.dice.choice(REFUSALS)

        life = self.train(folder, 2, refuse)
        kind = self.plan.refuse_with
        self.plan.refuse_with = None
        self.score.faults[kind[1] if kind else "refused too late"] += 1
        self.judge(folder, life)

    def kill_uploader(self, folder: str) -> None:
        self._kill(folder, lambda meeting, rank: (meeting.wait_for("uploader", rank) or {}).get("uploader"), "uploader")

    def kill_rank(self, folder: str) -> None:
        self._kill(folder, lambda meeting, rank: meeting.rank_pid(rank), "rank")

    def _kill(self, folder: str, who: Callable[[Meeting, int], int | None], kind: str) -> None:
        """SIGKILL at a request of the save, or at a moment of it where there are no requests; then the next attempt."""
        victim, at = self.dice.randrange(2), self.plan.done["requests"] + self.dice.randint(1, 24)
        later = self.dice.uniform(0, 0.03)
        remote = not folder.startswith("file:")
        killed = []

        def kill(meeting: Meeting) -> None:
            pid = who(meeting, victim)
            if remote:
                self.request(meeting, at)
            else:
                meeting.wait_for("saving", victim, self.dice.randint(1, 2))
                meeting.over.wait(later)
            if pid is not None and not meeting.over.is_set() and meeting.kill(pid):
                killed.append(pid)

        first = self.train(folder, 2, kill)
        self.score.faults[f"SIGKILL {kind}"] += len(killed)
        self.judge(folder, first)
        steps = self.commits(folder)
        second = self.train(folder, 1, attempt=2, **({"resume": max(steps)} if steps else {}))
        self.judge(folder, second)

    def duel(self, folder: str) -> None:
        """An old attempt does not know that it is over, and commits the same steps as the new one."""
        with tempfile.TemporaryDirectory() as place:
            fence = Path(place) / "cluster.db"
            with contextlib.closing(sqlite3.connect(fence)) as db:
                db.execute("CREATE TABLE jobs (uid TEXT, status TEXT)")
                db.execute("INSERT INTO jobs VALUES ('uid', '{\"attempt\": 1}')")
                db.commit()

            def depose(meeting: Meeting) -> None:
                meeting.wait_for("saving", 0, 2)
                with contextlib.closing(sqlite3.connect(fence, timeout=10)) as db:
                    db.execute("UPDATE jobs SET status = '{\"attempt\": 2}'")
                    db.commit()

            old = self.train(folder, 3, depose, fence=f"sqlite://{fence}", world=1)
            new = self.train(folder, 3, attempt=2, fence=f"sqlite://{fence}", world=1)
            late = self.train(folder, 2, attempt=1, fence=f"sqlite://{fence}", world=1)
        self.score.faults["stale attempt"] += 2
        if any(note["committed"] for note in late.said("outcome")):
            self.score.lies.append(f"{folder}: a stale attempt committed")
        self.judge(folder, old, new)

    def full_disk(self, folder: str) -> None:
        first = self.train(folder, 1)
        second = self.train(folder, 2, attempt=2, resume=1, file_bytes_max=self.dice.randint(100, 5_000))
        self.score.faults["disk full"] += 1
        self.judge(folder, first, second)

    def damaged(self, folder: str, files: Path, times: int) -> None:
        """Damage the newest of three commits, again and again: the one before must be found, nothing half loaded."""
        self.judge(folder, self.train(folder, 3))
        steps = self.commits(folder)
        if len(steps) < 2:
            return
        pristine = files.with_name(f"{files.name}.pristine")
        shutil.copytree(files, pristine)
        newest = f"step-{steps[-1]:08d}"
        for _ in range(times):
            of_newest = [p for p in (files / newest).rglob("*") if p.is_file()] + [files / "commits" / f"{newest}.json"]
            kind, path = damage(of_newest, self.dice)
            self.score.faults[kind] += 1
            self.score.damage_tried += 1
            order = {"do": "check", "world": 1, "folder": folder, "environment": self.environment}
            life = self.nursery.live(**order, steps=[steps[-1]], fall_back=True)
            exact, fallen = life.said("step")[0], life.said("fallen")[0]
            caught = exact.get("untouched", False) and fallen.get("digest") == self.truth[fallen["fallen"]]
            if caught and fallen["fallen"] == steps[-2]:
                self.score.damage_caught += 1
                self.score.fall_back_seconds.append(fallen["seconds"])
            else:
                self.score.lies.append(f"{folder}: {kind} of {path.name} was not caught: {exact} {fallen}")
            shutil.rmtree(files)
            shutil.copytree(pristine, files)
        shutil.rmtree(pristine)

    def request(self, meeting: Meeting, number: int) -> bool:
        """Wait for the proxy's request of that number; False when the gang ends before."""
        while self.plan.done["requests"] < number:
            if meeting.over.wait(0.002):
                return False
        return True


def truth(nursery: Nursery, folder: Path) -> dict[int, Any]:
    """The digest of the state after each step: of a run without faults, loaded from its commits one by one."""
    known: dict[int, Any] = {}
    uri = (folder / "truth").as_uri()
    for last in range(3, STEPS_KNOWN + 1, 3):
        more = {"resume": last - 3} if last > 3 else {}
        nursery.live(do="train", world=2, folder=uri, steps=3, attempt=last, **more)
        said = nursery.live(do="check", world=1, folder=uri, steps=list(list_commits(uri)))
        known |= {note["step"]: note["digest"] for note in said.said("step")}
    return known


def drill_folder(drill: Drill, place: Path, rounds: int) -> None:
    kinds = ("kill_uploader", "kill_rank", "duel", "full_disk")
    for number in range(rounds):
        getattr(drill, kinds[number % len(kinds)])((place / f"folder-{number}").as_uri())
    drill.damaged((place / "damaged").as_uri(), place / "damaged", times=4 * rounds)


def drill_server(drill: Drill, server: S3Server, files: Path | None, rounds: int, name: str) -> None:
    """files: the folder behind the server, where there is one."""
    kinds = ("storm", "kill_uploader", "storm", "kill_rank", "refusal", "storm", "outage", "duel")
    drill.plan = Plan(seed=drill.dice.randrange(1 << 30), checks_crc32=files is None)
    with faulty_proxy(server.url, drill.plan) as url:
        drill.environment = {**S3Server(url).environment(), "MUSTER_S3_RETRY_SECONDS": "2"}
        for number in range(rounds):
            getattr(drill, kinds[number % len(kinds)])(f"s3://{BUCKET}/{name}-{number}")
        if files is not None:
            drill.damaged(f"s3://{BUCKET}/{name}-damaged", files / BUCKET / f"{name}-damaged", times=rounds)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=16, help="rounds per store")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--no-dcp", action="store_true", help="leave out torch.distributed.checkpoint")
    chosen = arguments.parse_args()
    began, score = time.monotonic(), Scorecard()
    with tempfile.TemporaryDirectory(prefix="muster-drill-") as temporary:
        place = Path(temporary)
        with nursery(place / "nursery.log") as gangs:
            known = truth(gangs, place)
            drill_folder(Drill(gangs, known, score, chosen.seed), place, chosen.rounds // 2)
            print(f"folder done: {sum(score.faults.values())} faults, {time.monotonic() - began:.0f} s", flush=True)
            with rclone_server(place / "rclone") as server:
                drill_server(Drill(gangs, known, score, chosen.seed + 1), server, place / "rclone", chosen.rounds, "r")
            print(f"rclone done: {sum(score.faults.values())} faults, {time.monotonic() - began:.0f} s", flush=True)
            with moto_server() as server:
                drill_server(Drill(gangs, known, score, chosen.seed + 2), server, None, chosen.rounds // 2, "m")
            print(score.text(f"Muster, seed {chosen.seed}", time.monotonic() - began), flush=True)
            if not chosen.no_dcp:
                began_dcp, other = time.monotonic(), Scorecard()
                drill_dcp(gangs, place / "dcp", other, chosen.seed, score)
                print(other.text("torch.distributed.checkpoint, in a folder", time.monotonic() - began_dcp))
    return 1 if score.lies or score.unloadable or score.damage_caught < score.damage_tried else 0


if __name__ == "__main__":
    sys.exit(main())
