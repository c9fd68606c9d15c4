"""The launcher of programs as an image that knows nothing of Muster has it: a folder of files."""

import shutil
from pathlib import Path

import muster.worker
from muster.trainer.launch.program import INIT, MAIN


def write_launcher(folder: Path) -> None:
    hidden = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(muster.worker.__path__[0], folder / "muster" / "worker", ignore=hidden)
    (folder / "muster" / "__init__.py").write_text(INIT)
    (folder / "__main__.py").write_text(MAIN)
