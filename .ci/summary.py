"""Summary of a build's steps from their output, for the end of the log: some build servers keep nothing else.

    summary.py FOLDER [FAILED STEP...]

FOLDER holds the output of each step in a file of its name. Written for the system's own Python, without any package."""

import re
import sys
from collections import Counter
from pathlib import Path

TEST_STEPS = ("tests", "long-tests", "cluster-tests")
ERROR_LINES_MAX = 28  # of each failure; with its captured lines about 40
CAPTURED_LINES_MAX = 12
FAILURES_MAX = 25  # shown with their lines; all are named
STEP_LINES_MAX = 40  # of a failed step that tells of no failed test
WIDTH = 400  # one assertion may print a whole reply in a line

SECTION = re.compile(r"=+ (.*[^=]) =+$")
TITLE = re.compile(r"_+ (?=.*[^_ ])(.+) _+$")  # but not the `_ _ _ _` between the entries of a traceback
CAPTURED = re.compile(r"-+ Captured .* -+$")
SKIPPED = re.compile(r"SKIPPED \[(\d+)\] (?:\S+?:\d+: )?(.*)")
SUMMARY = re.compile(r"(?:FAILED|ERROR|SUBFAILED\S*|XPASS|XPASS\(strict\))[ :]")
CLOSING = re.compile(r"=+ .*(?:passed|failed|error|no tests ran).* in [0-9.]+s")


def failures(lines: list[str]) -> dict[str, list[str]]:
    """The lines of each failed test's block by its title."""
    blocks: dict[str, list[str]] = {}
    block: list[str] | None = None
    inside = False
    for line in lines:
        if section := SECTION.match(line):
            inside, block = section[1] in ("FAILURES", "ERRORS"), None
        elif inside and (title := TITLE.match(line)):
            block = blocks.setdefault(title[1], [])
        elif block is not None:
            block.append(line)
    return blocks


def essence(block: list[str]) -> list[str]:
    """Return the error lines of a failure and the last lines that were captured, about forty at most."""
    errors = [line for line in block if re.match(r"E(?:   |$)", line)]
    if not errors:  # such as a worker's crash, which has no traceback
        return block[-ERROR_LINES_MAX:]
    if len(errors) > ERROR_LINES_MAX:
        errors = [*errors[: ERROR_LINES_MAX - 8], "E   ...", *errors[-7:]]
    places = [line for line in block if re.match(r"\S+\.py:\d+: ", line)]
    captured = [number for number, line in enumerate(block) if CAPTURED.match(line)]
    tail = [block[captured[-1]], *block[captured[-1] + 1 :][-CAPTURED_LINES_MAX:]] if captured else []
    return [*errors, *places[-1:], *tail]


def write(lines: list[str]) -> None:
    for line in lines:
        print(line if len(line) <= WIDTH else f"{line[:WIDTH]} ... ({len(line) - WIDTH} characters more)")


def main(folder: Path, failed: list[str]) -> None:
    steps = {name: (folder / name).read_text(errors="replace").splitlines() for name in [*TEST_STEPS, *failed]
             if (folder / name).exists()}  # fmt: skip
    skipped: Counter[str] = Counter()
    for match in (SKIPPED.match(line) for name in TEST_STEPS for line in steps.get(name, ())):
        if match:
            skipped[match[2]] += int(match[1])
    if skipped:
        write([f"=== skipped: {skipped.total()} tests", *(f"{count:5} {why}" for why, count in skipped.most_common())])
    for name in failed:
        lines = steps.get(name, [])
        blocks = failures(lines) if name in TEST_STEPS else {}
        if not blocks:
            write([f"=== {name} failed; its last lines:", *lines[-STEP_LINES_MAX:]])
        for title, block in list(blocks.items())[:FAILURES_MAX]:
            write([f"=== {name}: {title}", *essence(block)])
        if len(blocks) > FAILURES_MAX:
            write([f"=== {name}: {len(blocks) - FAILURES_MAX} more failures are named below"])
    for name in TEST_STEPS:
        write([line for line in steps.get(name, ()) if SUMMARY.match(line)])
    for name in TEST_STEPS:
        write([line for line in steps.get(name, ()) if CLOSING.match(line)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
