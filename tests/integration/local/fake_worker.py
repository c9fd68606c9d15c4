"""A worker without a model: keeps the promises of `muster.trainer.launch` in milliseconds, or breaks them when told.

Standard library only, so that it starts at once. Every rank holds a lock on its place in the job while it lives and
notes each step in `trace.jsonl`; a second gang would find the lock taken and say so in `double`.

FAKE_STEP_SECONDS, FAKE_COMMIT_EVERY   how fast it goes, how often rank 0 commits
FAKE_EXIT   `attempt:step:code`        the rank ends there with that code
FAKE_SAY                               what the launcher adds to its words about a failure
FAKE_HOLD_AT `step`, `attempt:step`    attempt 1, or that one, stands there until the job's folder has a file `go`
FAKE_STUBBORN                          SIGTERM is ignored
FAKE_STRAY                             each rank starts a process of its own session that ignores SIGTERM
FAKE_GARBAGE                           every other heartbeat is rubbish
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# As the launcher does: on a shared machine the job's own variables come under names of their own.
for own in [name for name in os.environ if name.startswith("MUSTER_OWN_")]:
    os.environ[own.removeprefix("MUSTER_OWN_")] = os.environ.pop(own)

FOLDER = Path(os.environ["MUSTER_WORKER_DIR"])
ATTEMPT = int(os.environ["MUSTER_ATTEMPT"])
STARTED = time.time()
HOLD_ATTEMPT, HOLD_AT = map(int, f"1:{os.environ.get('FAKE_HOLD_AT', '-1')}".split(":")[-2:])
PR_SET_PDEATHSIG = 1


def write_whole(path: Path, document: dict) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document))
    os.replace(temporary, path)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def launch() -> int:
    if os.environ.get("FAKE_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
    first = int(os.environ["PET_NODE_RANK"]) * int(os.environ["PET_NPROC_PER_NODE"])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-S", __file__, "rank", str(first + local)],
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        for local in range(int(os.environ["PET_NPROC_PER_NODE"]))
    ]
    failed = None
    while any(rank.poll() is None for rank in ranks):
        failed = failed or next((rank for rank in ranks if rank.returncode), None)
        if failed:
            [rank.kill() for rank in ranks]
        time.sleep(0.01)  # not a wait: the launcher's own monitor interval
    failed = failed or next((rank for rank in ranks if rank.returncode), None)
    code = failed.returncode if failed else 0
    number = first + ranks.index(failed) if failed else None
    shown = code if code >= 0 else 128 - code
    message = f"rank {number} ended with {shown} {os.environ.get('FAKE_SAY', '')}" if failed else ""
    write_whole(
        FOLDER / "exit.json",
        {
            "exitCode": shown,
            "at": time.time(),
            "rank": number,
            "signal": -code if code < 0 else None,
            "message": message,
        },
    )
    return shown


class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.job = Path(os.environ["MUSTER_CHECKPOINT_URI"].removeprefix("file://"))
        self.step = int(os.environ["MUSTER_RESUME_STEP"])
        self.steps = json.loads(os.environ["MUSTER_CONFIG"])["training"]["length"]["steps"]
        self.told_to_stop = False
        self.progressed_at = STARTED
        self.commit_step = None

    def run(self) -> int:
        (self.job / "commits").mkdir(parents=True, exist_ok=True)
        place = os.open(self.job / f"rank-{self.rank}.lock", os.O_RDWR | os.O_CREAT)  # held to the end
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (self.job / "double").write_text(f"rank {self.rank} of attempt {ATTEMPT} is not alone\n")
        if not os.environ.get("FAKE_STUBBORN"):
            signal.signal(signal.SIGTERM, self.stop)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ.get("FAKE_STRAY"):
            subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait; sleep 600"], start_new_session=True)
        self.beat("init")
        exit_attempt, exit_step, exit_code = map(int, os.environ.get("FAKE_EXIT", "0:0:0").split(":"))
        while self.step < self.steps:
            time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0.02")))  # not a wait: the work itself
            if (
                (ATTEMPT, self.step) == (HOLD_ATTEMPT, HOLD_AT)
                and not self.told_to_stop
                and not (self.job / "go").exists()
            ):
                continue
            self.step += 1
            self.progressed_at = time.time()
            self.note()
            if self.step % int(os.environ.get("FAKE_COMMIT_EVERY", "5")) == 0:
                self.commit()
            self.beat("step")
            if (ATTEMPT, self.step) == (exit_attempt, exit_step):
                self.fail(exit_code)
                return exit_code
            if self.told_to_stop:
                self.commit()
                return 85
        self.commit()
        self.beat("done")
        return 0

    def stop(self, *_: object) -> None:
        self.told_to_stop = True

    def fail(self, code: int) -> None:
        write_whole(
            FOLDER / f"rank-{self.rank}.failure.json",
            {"rank": self.rank, "step": self.step, "exitCode": code, "message": "told to fail", "at": time.time()},
        )

    def note(self) -> None:
        with open(self.job / "trace.jsonl", "a") as trace:
            line = {"attempt": ATTEMPT, "rank": self.rank, "step": self.step, "pid": os.getpid(), "at": time.time()}
            trace.write(json.dumps(line) + "\n")

    def beat(self, phase: str) -> None:
        if os.environ.get("FAKE_GARBAGE") and self.step % 2:
            (FOLDER / f"rank-{self.rank}.json").write_bytes(b'{"attempt": 1, "rank\xff\x00')
            return
        with contextlib.suppress(FileNotFoundError):  # the folder may be moved away at any moment; the rank trains on
            write_whole(FOLDER / f"rank-{self.rank}.json", self.heartbeat(phase))

    def heartbeat(self, phase: str) -> dict:
        return {
            "attempt": ATTEMPT,
            "rank": self.rank,
            "pid": os.getpid(),
            "phase": phase,
            "step": self.step,
            "at": time.time(),
            "progressedAt": self.progressed_at,
            "startedAt": STARTED,
            "lastCommitStep": self.commit_step,
            "lastStep": self.last_step() if self.step else None,
        }

    def last_step(self) -> dict:
        numbers = dict.fromkeys(("loss", "gradNorm", "lr", "tokensPerSecond", "stepSeconds", "dataWaitSeconds"), 0.5)
        counts = {"tokens": 1, "memoryBytes": 1, "step": self.step, "steps": self.steps, "attempt": ATTEMPT}
        return {"type": "step", "at": self.progressed_at} | numbers | counts

    def commit(self) -> None:
        self.commit_step = self.step
        if self.rank:
            return
        write_whole(
            self.job / "commits" / f"step-{self.step:08d}.json",
            sealed_commit(
                {
                    "version": 1,
                    "job": os.environ["MUSTER_JOB"],
                    "jobUid": os.environ["MUSTER_JOB_UID"],
                    "attempt": ATTEMPT,
                    "step": self.step,
                    "committedAt": time.time(),
                    "worldSize": 2,
                    "files": [],
                    "tensors": {},
                    "cursor": {"seed": 0, "epoch": 0, "sample": self.step},
                    "config": {},
                    "architecture": {},
                }
            ),
        )


def sealed_commit(document: dict) -> dict:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return {**document, "seal": hashlib.sha256(text.encode()).hexdigest()}


if __name__ == "__main__":
    sys.exit(Rank(int(sys.argv[2])).run() if sys.argv[1:2] == ["rank"] else launch())
