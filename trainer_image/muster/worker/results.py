"""Results of a program: the JSON file of named numbers that it leaves at $MUSTER_RESULTS.

They end in the job's status by way of the exit record, which in a pod is the termination message of at most 4 KiB: so
they are few, and a file that breaks a rule counts as a whole or not at all, with the reason.
"""

from __future__ import annotations

import json
import math
import os

from muster.worker.files import read_regular

NUMBERS_MAX = 50
NAME_LENGTH_MAX = 100
# Of them all as JSON: the exit record with its message takes the other half of a termination message.
RESULTS_BYTES_MAX = 2_000
FILE_BYTES_MAX = 1_000_000


def read_results(path: str) -> tuple[dict[str, float], str]:
    """Return the numbers by their names, and why there are none although there is a file; both empty without one."""
    try:
        document = json.loads(read_regular(path, FILE_BYTES_MAX))
    except FileNotFoundError:
        return {}, f"{path} is no regular file" if os.path.lexists(path) else ""
    except OSError as error:
        return {}, f"{path} can't be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return {}, f"{path} is no JSON: {error}"[:300]
    fault = _fault(document)
    if fault:
        return {}, f"{path}: {fault}"
    return {name: float(value) for name, value in document.items()}, ""


def _fault(document: object) -> str:
    if not isinstance(document, dict):
        return 'it must be one JSON object of named numbers, such as {"accuracy": 0.5}'
    if len(document) > NUMBERS_MAX:
        return f"it has {len(document)} entries; at most {NUMBERS_MAX}"
    for name, value in document.items():
        if not name.strip() or len(name) > NAME_LENGTH_MAX or not name.isprintable():
            return f"the name {name[:NAME_LENGTH_MAX]!r} must be 1 to {NAME_LENGTH_MAX} printable characters"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{name!r} must be a number, not {json.dumps(value)[:60]}"
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            return f"{name!r} must be a finite number, not {str(value)[:60]}"
    size = len(json.dumps(document).encode())
    if size > RESULTS_BYTES_MAX:
        return f"the numbers and their names take {size} bytes; at most {RESULTS_BYTES_MAX}: report fewer"
    return ""
