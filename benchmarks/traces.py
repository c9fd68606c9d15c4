"""What jobs ask for, for benchmarks/fairness.py: drawn by the published shape of large clusters, or read of a trace.

A trace is a table with a header, a line for each job: when it was submitted, how long it ran, on how many GPUs, and for
whom. Read are the names that public traces have: Philly's (`timestamp, duration, num_gpus, cluster`, as artifacts of
papers keep it), Helios' (`submit_time, duration, gpu_num, vc`; of its cluster Venus as an artifact keeps it
`arrival_s, service_sec, gpu_count`) and Acme's (`submit_time, duration, gpu_num, user`). None of them is part of this
repository, and none says priorities or commits.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

GPUS = 8
URGENT = 0.15
SIZES = ((1, 0.58), (2, 0.16), (4, 0.13), (8, 0.09), (16, 0.04))
SUBMITTED, SECONDS, ASKED, WHOSE = (
    ("submit_time", "timestamp", "arrival_s"),
    ("duration", "service_sec"),
    ("gpu_num", "num_gpus", "gpu_count"),
    ("vc", "cluster", "user"),
)


@dataclass(frozen=True)
class Submission:
    at: float
    seconds: float
    nodes: int
    gpus: int
    """Of each node."""
    project: str
    urgent: bool


def drawn(jobs: int, dice: random.Random, projects: list[str]) -> list[Submission]:
    """Most jobs are small and short, a few large ones take most GPU time; times of submission are uniform in [0, 1)."""
    found = []
    for _ in range(jobs):
        size = dice.choices([size for size, _ in SIZES], [share for _, share in SIZES])[0]
        seconds = min(86_400.0, dice.lognormvariate(7.1, 1.3)) * (2.0 if size >= 8 else 1.0)
        urgent = dice.random() < URGENT and size < 8
        found.append(Submission(0.0, seconds, size, GPUS, dice.choice(projects), urgent))
    times = sorted(dice.random() for _ in found)
    return [replace(each, at=at) for each, at in zip(found, times, strict=True)]


def read(path: Path, jobs: int, nodes_max: int, dice: random.Random, weights: Mapping[str, float]) -> list[Submission]:
    """So many consecutive jobs of the trace, from a place that the dice choose. Left out are jobs without GPUs, without
    a duration, and larger than `nodes_max` nodes. Groups of people are put together to one project for each weight;
    where the trace names nobody, the dice deal the jobs to the projects, by their weights.
    """
    rows = sorted(_rows(path, nodes_max), key=lambda row: row[0])
    if len(rows) < jobs:
        raise SystemExit(f"{path}: has {len(rows)} jobs that can be replayed, and {jobs} are asked for: use --jobs")
    first = dice.randrange(len(rows) - jobs + 1)
    chosen = rows[first : first + jobs]
    names, shares = list(weights), list(weights.values())
    projects = _projects([row for row in chosen if row[3]], weights)
    return [
        Submission(
            at,
            seconds,
            -(-gpus // GPUS),
            min(gpus, GPUS),
            projects[whose] if whose else dice.choices(names, shares)[0],
            _urgent(dice, gpus),
        )
        for at, seconds, gpus, whose in chosen
    ]


def _rows(path: Path, nodes_max: int) -> list[tuple[float, float, int, str]]:
    found = []
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        names = table.fieldnames or []
        at, seconds, gpus = (_column(path, names, known) for known in (SUBMITTED, SECONDS, ASKED))
        whose = next((name for name in WHOSE if name in names), "")
        for row in table:
            try:
                asked, lasted, submitted = int(float(row[gpus])), float(row[seconds]), _time(row[at])
            except ValueError:  # such as a job that never began and has no duration
                continue
            if asked > 0 and lasted > 0 and -(-asked // GPUS) <= nodes_max:
                found.append((submitted, lasted, asked, row[whose] if whose else ""))
    return found


def _column(path: Path, names: list[str] | tuple[str, ...], known: tuple[str, ...]) -> str:
    for name in known:
        if name in names:
            return name
    raise SystemExit(f"{path}: has no column {' or '.join(known)}; it has {', '.join(names) or 'none'}")


def _time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _projects(rows: list[tuple[float, float, int, str]], weights: Mapping[str, float]) -> dict[str, str]:
    """The largest group goes to the project that has least GPU time for its weight, then the next."""
    asked: dict[str, float] = defaultdict(float)
    for _, seconds, gpus, whose in rows:
        asked[whose] += seconds * gpus
    held = dict.fromkeys(weights, 0.0)
    found = {}
    for whose in sorted(asked, key=lambda whose: (-asked[whose], whose)):
        found[whose] = min(held, key=lambda name: (held[name] / weights[name], name))
        held[found[whose]] += asked[whose]
    return found


def _urgent(dice: random.Random, gpus: int) -> bool:
    return dice.random() < URGENT and gpus < 8 * GPUS
