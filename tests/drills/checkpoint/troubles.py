"""The troubles that a drill gives to gangs on one store, and how it is judged what became of their commits.

Training is deterministic, so the state after step n is known beforehand (the truth): a commit of step n that loads
anything else is a lie, and so is a save that claims success without a commit that loads.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.drills.checkpoint.damage import damaged
from tests.drills.checkpoint.faulty_proxy import FAULTS, Plan
from tests.drills.checkpoint.gangs import Life, Meeting, Nursery
from tests.drills.checkpoint.scorecard import Scorecard

from muster.storage.listing import steps_in
from muster.storage.opening import open_store
from muster.storage.s3_store import S3Store
from muster.storage.settings import S3Settings
from muster.storage.small_files import write_whole
from muster.storage.store import Store
from muster.words.address import parse_address
from muster.words.checkpoint import QUARANTINE, commit_key, step_name

REFUSALS = (
    (403, "AccessDenied"),
    (404, "NoSuchBucket"),
    (400, "ExpiredToken"),
    (403, "RequestTimeTooSkewed"),
    (400, "AuthorizationHeaderMalformed"),  # another region
)
OUTAGES = ("store gone", "503 storm", "slow store")
OUTAGE_SECONDS = (0.3, 4.0)  # shorter and longer than MUSTER_S3_RETRY_SECONDS, which is 2
WRITES = 14  # of two ranks that find out what the server does and save twice; SIGKILL comes at each of them

Trouble = Callable[[str], None]  # is told the job's folder


class Drill:
    """One store (a folder, or a server behind a faulty proxy) and the lives that are lived on it.

    endpoint: of the proxy; None for a folder. truth: by step, the digest of the state."""

    def __init__(self, nursery: Nursery, truth: dict[int, Any], seed: int, plan: Plan, endpoint: str | None) -> None:
        self.nursery, self.truth, self.plan, self.endpoint = nursery, truth, plan, endpoint
        self.score, self.dice = Scorecard(), random.Random(seed)
        self.environment: dict[str, str] = {}
        if endpoint is not None:
            self.environment = {"MUSTER_S3_ENDPOINT": endpoint, "MUSTER_S3_RETRY_SECONDS": "2"}

    def troubles(self) -> Iterator[tuple[str, Trouble]]:
        """All that is done to this kind of store, by name."""
        for number in range(WRITES):
            who = ("uploader", "rank")[number % 2]
            yield f"kill-{number}", partial(self.kill, who=who, write=1 + number)
        for number in range(2):
            yield f"duel-{number}", self.duel
            yield f"removed-{number}", self.removed_while_read
        if self.endpoint is None:
            for number in range(2):
                yield f"full-{number}", self.full_disk
                yield f"read-only-{number}", self.read_only
            return
        for fault in FAULTS:
            yield f"first-{fault}", partial(self.every_request, fault=fault)
        for number in range(4):
            yield f"storm-{number}", self.storm
        for name, behind in (("lag", 1), ("empty", None)):
            yield f"listings-{name}", partial(self.listings, behind=behind)
        yield "rights-lost", self.rights_lost
        for code in ("NotImplemented", "InvalidRequest"):
            yield f"no-checksums-{code}", partial(self.no_checksums, code=code)
        for refusal in REFUSALS:
            yield f"refusal-{refusal[1]}", partial(self.refusal, kind=refusal)
        for kind in OUTAGES:
            for number, seconds in enumerate(OUTAGE_SECONDS):
                yield f"{kind.replace(' ', '-')}-{number}", partial(self.outage, kind=kind, seconds=seconds)

    def train(self, folder: str, steps: int = 2, meddle: Callable[[Meeting], None] | None = None, **more: Any) -> Life:
        order = {"do": "train", "world": 2, "folder": folder, "steps": steps, "environment": self.environment, **more}
        life = self.nursery.live(meddle, **order)
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
                self.score.lies.append(f"{folder}: step {step} was called committed, and there is no such checkpoint")
        self.load_all(folder, there)

    def load_all(self, folder: str, steps: list[int]) -> None:
        for note in self.check(folder, steps).said("step"):
            self.score.loads += 1
            if note.get("digest") != self.truth[note["step"]]:
                self.score.unloadable.append(f"{folder} step {note['step']}: {note.get('error', 'another state')}")

    def store(self, folder: str) -> Store:
        if self.endpoint is None:
            return open_store(folder)
        return S3Store(parse_address(folder), S3Settings(endpoint=self.endpoint, addressing="path", retry_seconds=10))

    def commits(self, folder: str) -> list[int]:
        return list(steps_in(self.store(folder)))

    # --- one kind of trouble each ---

    def every_request(self, folder: str, fault: str) -> None:
        """Each request of the saves and of the resume fails when it is made for the first time."""
        before = self.plan.done[fault]
        self.plan.first_time = fault
        first = self.train(folder, 2)
        second = self.train(folder, 1, attempt=2, resume=99)
        self.plan.first_time = None
        self.score.faults[fault] += self.plan.done[fault] - before
        self.judge(folder, first, second)

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

    def outage(self, folder: str, kind: str, seconds: float) -> None:
        """In the middle of a save the store is gone, refuses everybody or crawls, for less or more than retries
        last."""
        at = self.plan.done["requests"] + self.dice.randint(4, 14)

        def begin(meeting: Meeting) -> None:
            if not self.request(meeting, at):
                return
            self.plan.gone = kind == "store gone"
            self.plan.refuse_with = (503, "SlowDown") if kind == "503 storm" else None
            self.plan.reads_in = (512, 0.05) if kind == "slow store" else None
            self.score.faults[kind] += 1
            meeting.over.wait(seconds)
            self.end_outage()

        life = self.train(folder, 3, begin)
        self.end_outage()
        self.judge(folder, life)

    def end_outage(self) -> None:
        self.plan.gone, self.plan.refuse_with, self.plan.reads_in = False, None, None

    def refusal(self, folder: str, kind: tuple[int, str]) -> None:
        """From some request on, the store refuses: credentials, permissions, bucket, clock, region."""
        at = self.plan.done["requests"] + self.dice.randint(2, 14)

        def refuse(meeting: Meeting) -> None:
            if self.request(meeting, at):
                self.plan.refuse_with = kind
                self.score.faults[kind[1]] += 1

        life = self.train(folder, 2, refuse)
        self.plan.refuse_with = None
        self.judge(folder, life)

    def listings(self, folder: str, behind: int | None) -> None:
        """No listing shows the newest commits, or any, while a gang saves more of them than are kept."""
        before = self.plan.done["lagging listings"]
        self.plan.lagging = behind
        life = self.train(folder, 4)
        self.plan.lagging = 0
        self.score.faults["listing lags" if behind else "listing empty"] += self.plan.done["lagging listings"] - before
        self.judge(folder, life)

    def rights_lost(self, folder: str) -> None:
        """From some write on, the store lets nobody write; all can be read."""
        at = self.plan.done["writes"] + self.dice.randint(2, 14)

        def lose(number: int) -> None:
            if number >= at and self.plan.refuse_writes_with is None:
                self.plan.refuse_writes_with = (403, "AccessDenied")
                self.score.faults["rights lost"] += 1

        self.plan.at_write = lose
        life = self.train(folder, 3)
        self.plan.at_write, self.plan.refuse_writes_with = lambda number: None, None
        self.judge(folder, life)

    def no_checksums(self, folder: str, code: str) -> None:
        """A store that knows no checksums, and says so of each request that has one."""
        self.plan.refuses_checksums = (501 if code == "NotImplemented" else 400, code)
        life = self.train(folder, 2)
        self.plan.refuses_checksums = None
        self.score.faults[f"checksum {code}"] += 1
        self.judge(folder, life)
        if not self.commits(folder):
            self.score.unloadable.append(f"{folder}: nothing could be committed")

    def kill(self, folder: str, who: str, write: int) -> None:
        """SIGKILL to a rank or its upload process at a write of the saves: the server has it, and the answer finds
        nobody. In a folder, where nobody sees the writes, at some moment of a save. Then the next attempt."""
        at, victim, killed = self.plan.done["writes"] + write, self.dice.randrange(2), []
        save, later = self.dice.randint(1, 2), self.dice.uniform(0, 0.03)

        def kill(meeting: Meeting) -> None:
            pid = meeting.rank_pid(victim) if who == "rank" else meeting.uploader_pid(victim)

            def strike(number: int) -> None:
                if number >= at and not killed and pid is not None and not meeting.over.is_set() and meeting.kill(pid):
                    killed.append(pid)

            if self.endpoint is not None:
                self.plan.at_write = strike
                meeting.over.wait()
            elif meeting.wait_for("saving", victim, save):
                meeting.over.wait(later)
                strike(at)

        first = self.train(folder, 2, kill)
        self.plan.at_write = lambda number: None
        self.score.faults[f"SIGKILL {who}"] += len(killed)
        self.judge(folder, first)
        steps = self.commits(folder)
        second = self.train(folder, 1, attempt=2, **({"resume": max(steps)} if steps else {}))
        self.judge(folder, second)

    def duel(self, folder: str) -> None:
        """An old attempt does not know that it is over, and commits the same steps as the new one."""
        with self.nursery.folder() as place:
            fence = Path(place) / "fence.json"
            fence.write_text('{"status": {"attempt": 1}}')

            def depose(meeting: Meeting) -> None:
                meeting.wait_for("saving", 0, 2)
                write_whole(fence, '{"status": {"attempt": 2}}')

            old = self.train(folder, 3, depose, fence=fence.as_uri(), world=1)
            new = self.train(folder, 3, attempt=2, fence=fence.as_uri(), world=1)
            late = self.train(folder, 2, attempt=1, fence=fence.as_uri(), world=1)
        self.score.faults["stale attempt"] += 2
        if any(note["committed"] for note in late.said("outcome")):
            self.score.lies.append(f"{folder}: a stale attempt committed")
        self.judge(folder, old, new)

    def full_disk(self, folder: str) -> None:
        first = self.train(folder, 1)
        second = self.train(folder, 2, attempt=2, resume=1, file_bytes_max=self.dice.randint(100, 5_000))
        self.score.faults["disk full"] += 1
        self.judge(folder, first, second)

    def read_only(self, folder: str) -> None:
        first = self.train(folder, 1)
        place = Path(folder.removeprefix("file://"))
        folders = [place, *(path for path in place.rglob("*") if path.is_dir())]
        for path in folders:
            path.chmod(0o555)
        second = self.train(folder, 2, attempt=2, resume=1, obeys_modes=True)
        for path in folders:
            path.chmod(0o755)
        self.score.faults["read-only"] += 1
        if any(note["committed"] for note in second.said("outcome")):
            self.score.lies.append(f"{folder}: committed to a folder that can't be written")
        self.judge(folder, first, second)

    def removed_while_read(self, folder: str) -> None:
        """The newest commit is deleted, COMMIT first, at some moment of its being loaded."""
        self.judge(folder, self.train(folder, 2))
        steps, store = self.commits(folder), self.store(folder)
        if len(steps) < 2:
            return
        shards = [found.key for found in store.objects(f"{step_name(steps[-1])}/")]
        at, later = self.plan.done["requests"] + self.dice.randint(2, 8), self.dice.uniform(0, 0.05)

        def remove(meeting: Meeting) -> None:
            if self.endpoint is not None:
                self.request(meeting, at)
            else:
                meeting.wait_for("checking", 0)
                meeting.over.wait(later)
            for key in (commit_key(steps[-1]), *shards):
                store.delete(key)

        life = self.check(folder, steps[-1:], remove, fall_back=True)
        self.score.faults["removed while read"] += 1
        fallen = life.said("fallen")[0]
        if fallen.get("digest") != self.truth[fallen["fallen"]]:
            self.score.unloadable.append(f"{folder}: a checkpoint was removed, and then: {fallen}")
        self.load_all(folder, self.commits(folder))

    def damage(self, folder: str, times: int) -> None:
        """Damage the newest of three commits, again and again: the one before must be found, nothing half loaded."""
        self.judge(folder, self.train(folder, 3))
        steps, store = self.commits(folder), self.store(folder)
        if len(steps) < 2:
            self.score.lies.append(f"{folder}: nothing went wrong, and only {steps} are committed")
            return
        newest, before = steps[-1], steps[-2]
        keys = [commit_key(newest), *(found.key for found in store.objects(f"{step_name(newest)}/"))]
        pristine = {key: store.read(key) for key in keys}
        for _ in range(times):
            key = self.dice.choice(keys)
            kind, left = damaged(pristine[key], self.dice)
            if left is None:
                store.delete(key)
            else:
                store.replace(key, left)
            self.score.faults[kind] += 1
            self.score.damage_tried += 1
            life = self.check(folder, [newest], fall_back=True)
            exact, fallen = life.said("step")[0], life.said("fallen")[0]
            caught = exact.get("untouched", False) and fallen.get("digest") == self.truth[fallen["fallen"]]
            if caught and fallen["fallen"] == before:
                self.score.damage_caught += 1
                self.score.fall_back_seconds.append(fallen["seconds"])
            else:
                self.score.lies.append(f"{folder}: {kind} of {key} was not caught: {exact} {fallen}")
            for name in keys:
                store.replace(name, pristine[name])
            store.delete(f"{QUARANTINE}/{step_name(newest)}.json")

    def check(
        self, folder: str, steps: list[int], meddle: Callable[[Meeting], None] | None = None, **more: Any
    ) -> Life:
        order = {"do": "check", "world": 1, "folder": folder, "steps": steps, "environment": self.environment, **more}
        return self.nursery.live(meddle, **order)

    def request(self, meeting: Meeting, number: int) -> bool:
        """Wait for the proxy's request of that number; False when the gang ends before."""
        while self.plan.done["requests"] < number:
            if meeting.over.wait(0.002):
                return False
        return True
