"""What became of the notices, as a table."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

GOAL_SECONDS = 60.0
NOTICES = 100


@dataclass(frozen=True)
class Outcome:
    """One notice. Seconds count from the moment at which the metadata service began to announce it. told: until the
    operator's status says so. committed: until the COMMIT was published. verified: its every byte is as it was
    committed. back: until the next attempt's first step. lost_steps: trained and not in the commit.
    """

    job: str
    workers: int
    told: float
    committed: float
    verified: bool
    back: float
    lost_steps: int
    elsewhere: bool
    retries: int

    @property
    def good(self) -> bool:
        return self.verified and self.committed <= GOAL_SECONDS and self.elsewhere and not self.retries


@dataclass
class Scorecard:
    outcomes: list[Outcome]
    requests: int = 0
    refused: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path | None) -> Scorecard:
        """What earlier runs have added up in a file; nothing where there is none."""
        if path is None or not path.exists():
            return cls([])
        document = json.loads(path.read_text())
        return cls(**document | {"outcomes": [Outcome(**outcome) for outcome in document["outcomes"]]})

    def __add__(self, other: Scorecard) -> Scorecard:
        return Scorecard(
            [*self.outcomes, *other.outcomes],
            self.requests + other.requests,
            self.refused + other.refused,
            self.seconds + other.seconds,
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    def percentile(self, name: str, share: float) -> float:
        """The smallest value that at least this share of all does not exceed."""
        values = sorted(float(asdict(outcome)[name]) for outcome in self.outcomes)
        return values[max(0, min(len(values) - 1, -int(-share * len(values) // 1) - 1))]

    @property
    def good(self) -> bool:
        return bool(self.outcomes) and self.percentile("committed", 0.99) <= GOAL_SECONDS and not self.faults()

    def faults(self) -> list[str]:
        return [f"{outcome}" for outcome in self.outcomes if not outcome.good and outcome.committed <= GOAL_SECONDS]

    def table(self) -> str:
        rows = [("seconds after the notice", "p50", "p90", "p99", "worst")]
        for name, words in (
            ("told", "the operator knows"),
            ("committed", "a checkpoint is published"),
            ("back", "the next attempt has trained a step elsewhere"),
        ):
            values = (f"{self.percentile(name, share):.1f}" for share in (0.5, 0.9, 0.99, 1.0))
            rows.append((words, *values))
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, "|---|--:|--:|--:|--:|")
        return "\n".join(lines)

    def summary(self) -> str:
        count = len(self.outcomes)
        counted = {
            "with a checkpoint by T+60 s": sum(outcome.committed <= GOAL_SECONDS for outcome in self.outcomes),
            "whose checkpoint was read back and verified": sum(outcome.verified for outcome in self.outcomes),
            "that lost no step": sum(outcome.lost_steps == 0 for outcome in self.outcomes),
            "after which training went on elsewhere": sum(outcome.elsewhere for outcome in self.outcomes),
            "that consumed a retry": sum(bool(outcome.retries) for outcome in self.outcomes),
        }
        lines = [f"| notices {words} | {number} of {count} |" for words, number in counted.items()]
        share = 100 * self.refused / max(1, self.requests)
        lines.append(
            f"| requests to the store, of them answered with 503 | {self.requests}, {self.refused} ({share:.1f} %) |"
        )
        return "\n".join(["| | |", "|---|--:|", *lines])

    def page(self) -> str:
        machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
        minutes, count = self.seconds / 60, len(self.outcomes)
        short = "" if count >= NOTICES else f" But {count} notices are not yet the {NOTICES} of which it speaks."
        return (
            f"# Spot notices\n\nWritten by `make drill-spot ARGS='--write docs/scorecard-spot.md'`; {minutes:.0f} min "
            f"on {machine}. With `--results FILE` several shorter runs add up. Nodes are virtual and their metadata "
            "services stand-ins; agents, operator, trainer, checkpoints and the S3 server (rclone, behind a proxy that "
            "refuses) are real. A gang of two and a gang of one are struck, each on its own.\n\n"
            f"{self.table()}\n\n{self.summary()}\n\nGoal: a verified checkpoint by T+60 s at p99, no retry "
            f"consumed, training continues elsewhere: {'held' if self.good else 'NOT held'}.{short}\n"
        )
