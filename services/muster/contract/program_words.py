"""Words about a program of the user's own: its command, and how it resumes, as far as Muster knows. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

# Muster puts the newest checkpoint that verifies into place. Whether the program reads it, and goes on with the next
# of its data, only the program knows.
RESUMES = "by the program; data position not checked"
BEGINS_ANEW = "no checkpoint of the program's is kept yet, so that a restart begins anew"


def program_command(spec: Mapping[str, Any]) -> str:
    """Return the program's command line, with how often it is started; `spec` is the job's, as a document."""
    program = spec["program"]
    once = "worker" if program.get("launcher") == "none" else "rank"
    return f"{shlex.join(program['command'])}  (once per {once})"


def program_facts(spec: Mapping[str, Any], status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a program that a job's page and `muster get` show; none for a training."""
    if not spec.get("program"):
        return []
    return [
        ("program", program_command(spec)),
        ("resumes", RESUMES if status.get("checkpoint") else BEGINS_ANEW),
    ]
