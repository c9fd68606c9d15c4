"""Words for the step records in a worker's log, the same on the command line and on pages. Pure."""

from __future__ import annotations

import json
import math
from typing import Any

from muster.words.text import amount, duration, loss

_BEGINS = '{"'  # a step record is one JSON object on its line (trainer's StepLog)
_BYTES_MAX = 4_000  # a record has some 500


def in_words(text: str) -> str:
    return "\n".join(step_words(line) or line for line in text.split("\n"))


def step_words(line: str) -> str:
    """Return the words for a step record; empty for anything else, also for one that is cut or holds what no trainer
    writes."""
    if not line.startswith(_BEGINS) or '"step"' not in line or len(line) > _BYTES_MAX:
        return ""
    try:
        record = json.loads(line)
        if record["type"] != "step":
            return ""
        return "   ".join(_parts(record)).rstrip()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return ""


def _parts(record: dict[str, Any]) -> list[str]:
    """Return the parts of the line, each as wide as its values get, so that the lines of a log stand in columns."""
    step, last = int(record["step"]), f"{int(steps):,}" if (steps := record.get("steps")) else ""
    parts = [f"step {step:>{len(last)},}/{last}" if last else f"step {step:,}"]
    if step > 0:
        seconds = float(record["stepSeconds"])
        parts += [
            f"loss {_number(record['loss']):<7}",
            f"grad {_three_digits(record['gradNorm']):<8}",
            f"lr {_three_digits(record['lr']):<8}",
            f"{amount(float(record['tokensPerSecond'])):>5} tokens/s",
            f"{f'{seconds:.3g} s' if seconds < 100 else duration(seconds):>8}",
        ]
        if record.get("mfu") is not None:
            parts.append(f"MFU {100 * float(record['mfu']):.1f}%")
    if record.get("evaluationLoss") is not None:
        parts.append(f"evaluation loss {_number(record['evaluationLoss'])}")
    if record.get("skipped"):
        parts.append(f"skipped: {str(record['skipped'])[:200]}")
    return parts


def _three_digits(value: Any) -> str:
    return f"{float(value):.3g}"


def _number(value: Any) -> str:
    number = float(value)
    return loss(number) if math.isfinite(number) else str(number)
