"""Names and numbers that the launcher shares with the rest of Muster. It can't import them from muster.words, so a
test holds them equal (tests/unit/worker/test_worker_portability.py)."""

from __future__ import annotations

FIRST_INCARNATION = 1


class WorkerVariables:
    """Variables of a worker."""

    JOB = "MUSTER_JOB"
    JOB_UID = "MUSTER_JOB_UID"
    ATTEMPT = "MUSTER_ATTEMPT"
    WORKER = "MUSTER_WORKER"
    INCARNATION = "MUSTER_INCARNATION"
    RESUME_STEP = "MUSTER_RESUME_STEP"
    CONFIG = "MUSTER_CONFIG"
    WORKER_DIR = "MUSTER_WORKER_DIR"
    FENCE = "MUSTER_FENCE"
    REPORT_PORT = "MUSTER_REPORT_PORT"
    TERMINATION_LOG = "MUSTER_TERMINATION_LOG"
    POD_IP = "MUSTER_POD_IP"
    HOST_IP = "MUSTER_HOST_IP"
    CHECKPOINT_DIR = "MUSTER_CHECKPOINT_DIR"
    RESUME_DIR = "MUSTER_RESUME_DIR"
    SOURCE_DIR = "MUSTER_SOURCE_DIR"
    INPUTS_DIR = "MUSTER_INPUTS_DIR"
    STOP_FILE = "MUSTER_STOP_FILE"
    RESULTS = "MUSTER_RESULTS"


NOTICES_ENV = "MUSTER_NOTICES"
# Set by a launcher that adopts the processes that a dead rank leaves running, for its ranks.
LAUNCHER_ENV = "MUSTER_LAUNCHER_PID"


class ExitCode:
    """Exit codes of a worker."""

    DONE = 0
    USER_ERROR = 80
    OUT_OF_MEMORY = 81
    NUMERIC = 82
    STORAGE = 83
    PREFLIGHT_FAILED = 84
    PREEMPTED_COMMITTED = 85
    PREEMPTED_NO_COMMIT = 86
    STALE_ATTEMPT = 87
    PEER_LOST = 88
    HUNG = 89


# Files in MUSTER_WORKER_DIR.
EXIT_RECORD = "exit.json"
HEARTBEAT = "rank-{rank}.json"
PROGRESS = "rank-{rank}.progress.json"
PREPARED = "prepared.json"
KEEPER_STATE = "keeper.json"
RANKS_ENDED = "ranks-ended.json"
SAVER = "rank-{rank}.saver.json"
RANK_ERROR = "rank-{rank}.error.json"  # $TORCHELASTIC_ERROR_FILE, by torch's `record`
STOP = "stop.json"
RESULTS = "results.json"  # $MUSTER_RESULTS
WORK = "work"  # the working directory, where nobody prepared another

HEARTBEATS_PATH = "/heartbeats"
LAST_HEARTBEAT = "lastHeartbeat"
# As the operator waits for workers of which others ended well (core/causes.py).
UNEVEN_END_SECONDS = 1_800.0
# After a crash, for a checkpoint from the ranks' memories. A gang that is silent for longer is taken for hung
# (core/stalls.py).
AFTER_CRASH_SECONDS_MAX = 45.0


def rank_mark(rank: int) -> str:
    """Return the prefix of this rank's lines in its worker's log, unless it is the worker's first rank."""
    return f"[rank {rank}] "
