"""Write the client with threads from the one with asyncio: python tools/generate_client.py [--check]"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "services" / "muster" / "client"
# Connections and transfers are written by hand on both sides, because they wait by other means.
NAMES = ("files", "jobs", "muster", "sweeps")
NOTICE = """ with threads.

Written from `async_{name}.py` by `tools/generate_client.py`; change that file.
\"\"\""""
REPLACEMENTS = (
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    ("an asynchronous context manager, or close it.", "a context manager, or close it. Threads may share it."),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"\basync_(\w+)", r"\1"),
    (r"\bAsync(\w+)", r"\1"),
)
RUFF = (sys.executable, "-m", "ruff")


def text(name: str) -> str:
    """Return the contents of `{name}.py`."""
    source = (FOLDER / f"async_{name}.py").read_text()
    head, mark, rest = source.partition(' with asyncio."""')
    assert mark, f"async_{name}.py must begin with a docstring that ends in: with asyncio."
    for pattern, replacement in REPLACEMENTS:
        rest = re.sub(pattern, replacement, rest)
    source = head + NOTICE.format(name=name) + rest
    for step in (("check", "--select=I", "--fix", "--quiet"), ("format",)):
        command = [*RUFF, *step, f"--stdin-filename={FOLDER / name}.py", "-"]
        source = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    return source


def main(arguments: list[str]) -> int:
    for name in NAMES:
        target, wanted = FOLDER / f"{name}.py", text(name)
        if arguments != ["--check"]:
            target.write_text(wanted)
        elif not target.exists() or target.read_text() != wanted:
            print(f"{target.name} is not written from async_{name}.py; run python tools/generate_client.py")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
