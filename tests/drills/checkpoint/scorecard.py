"""What the drill counts, and how it is printed."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Scorecard:
    """faults: injected, by kind. lies: what must never be, one line each."""

    faults: Counter[str] = field(default_factory=Counter)
    saves: int = 0
    committed: int = 0
    failed_and_said_so: int = 0
    loads: int = 0
    damage_caught: int = 0
    damage_tried: int = 0
    resumed: int = 0
    fall_back_seconds: list[float] = field(default_factory=list)
    half_loaded: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    unloadable: list[str] = field(default_factory=list)

    def text(self, title: str, seconds: float) -> str:
        total = sum(self.faults.values())
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        saves = f"{self.saves} tried, {self.committed} committed, {self.failed_and_said_so} failed and said so"
        lines = [
            f"{title}: {total} faults in {seconds:.0f} s",
            f"  faults                    {faults}",
            f"  saves                     {saves}",
            f"  commits loaded and equal  {self.loads}",
            f"  damage caught             {self.damage_caught} of {self.damage_tried}",
            f"  fall-back                 {max(self.fall_back_seconds, default=0):.2f} s at most",
            f"  restarts resumed          {self.resumed}",
            f"  commits that fail to load {len(self.unloadable)}",
            f"  half loaded, then an error {len(self.half_loaded)}",
            f"  false successes           {len(self.lies)}",
        ]
        return "\n".join(lines + [f"    ! {line}" for line in (*self.unloadable, *self.half_loaded, *self.lies)])
