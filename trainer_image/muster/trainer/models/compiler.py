"""Check for a C compiler, which torch calls to compile kernels during training."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

from muster.trainer.errors import UserError

ADVICE = (
    "there is no C compiler here (gcc or clang, with Python.h): install gcc, or build the trainer's image with "
    "APT_PACKAGES=auto"
)


@cache
def has_compiler() -> bool:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")) and headers.exists()


def must_have_compiler() -> None:
    """Raises UserError."""
    if not has_compiler():
        raise UserError(f"parallel.compile: {ADVICE}; or leave compile out")
