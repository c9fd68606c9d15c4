"""What the drill counts, and how it is printed."""

import os
from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Scorecard:
    """faults: injected, by kind. lies, unloadable, half_loaded: what must never be, one line each."""

    faults: Counter[str] = field(default_factory=Counter)
    saves: int = 0
    committed: int = 0
    failed_and_said_so: int = 0
    loads: int = 0
    damage_caught: int = 0
    damage_tried: int = 0
    resumed: int = 0
    seconds: float = 0.0
    fall_back_seconds: list[float] = field(default_factory=list)
    half_loaded: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    unloadable: list[str] = field(default_factory=list)

    def add(self, other: "Scorecard") -> None:
        for name in (each.name for each in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def well(self) -> bool:
        return not (self.lies or self.unloadable or self.half_loaded) and self.damage_caught == self.damage_tried

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("faults", str(self.faults.total())),
            ("saves", f"{self.saves} tried, {self.committed} committed"),
            ("saves that failed and said so", str(self.failed_and_said_so)),
            ("false successes, other states than were saved", str(len(self.lies))),
            ("commits loaded, bit by bit what was saved", str(self.loads)),
            ("commits that fail to load", str(len(self.unloadable))),
            ("damage caught before a tensor changed", f"{self.damage_caught} of {self.damage_tried}"),
            ("half loaded, then an error", str(len(self.half_loaded))),
            ("restarts that resumed", str(self.resumed or "–")),
            (
                "slowest fall-back to the checkpoint before",
                f"{max(slow):.2f} s" if (slow := self.fall_back_seconds) else "–",
            ),
            ("the drill took", f"{self.seconds:.0f} s"),
        ]

    def kinds(self) -> str:
        return ", ".join(
            f"{kind} {count}" for kind, count in sorted(self.faults.items(), key=lambda kind: kind[0].lower())
        )

    def text(self, title: str) -> str:
        lines = [title, *(f"  {what:46} {value}" for what, value in self.rows()), f"  {self.kinds()}"]
        return "\n".join(lines + [f"    ! {line}" for line in (*self.unloadable, *self.half_loaded, *self.lies)])


def page(command: str, muster: Scorecard, dcp: Scorecard) -> str:
    """The scorecard as a document."""
    lines = [
        "# Checkpoints under faults",
        "",
        f"Written by `{command}` on {os.cpu_count()} cores. Muster saves to a folder and to two kinds of S3 server,",
        "torch.distributed.checkpoint (its asynchronous save, its file writer) to a folder. It had as many kills of a",
        "rank, full disks and damaged files as Muster. Which fault is shown where: [checkpoints.md](checkpoints.md).",
        "",
        "| | Muster | torch.distributed.checkpoint |",
        "|---|--:|--:|",
        *(
            f"| {what} | {ours} | {theirs} |"
            for (what, ours), (_, theirs) in zip(muster.rows(), dcp.rows(), strict=True)
        ),
        "",
        f"Muster's faults: {muster.kinds()}.",
        "",
        f"torch.distributed.checkpoint's: {dcp.kinds()}.",
    ]
    wrong = [*dcp.unloadable, *dcp.lies]
    if wrong:
        lines += ["", "What torch.distributed.checkpoint said nothing of:", "", *(f"- {line}" for line in wrong)]
    return "\n".join(lines) + "\n"
