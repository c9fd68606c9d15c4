"""Files that a foreign image is given: the launcher of programs, the hook that counts steps, and `muster.run`.

All of it is of the standard library and written for old Pythons, so that copying it is enough. `python3 FOLDER` starts
the launcher. There `muster` is a package with an `__init__.py`, which comes before any other `muster` that the image
may hold; in the hook's folder, which is on the program's own path, it has none, and hides nothing.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

MAIN = 'import runpy\n\nrunpy.run_module("muster.worker", run_name="__main__", alter_sys=True)\n'
INIT = '"""The launcher of programs, without the rest of Muster."""\n'
HOOK = Path("muster", "worker", "hook")


def write_launcher_files(folder: Path) -> None:
    """Raises OSError where the folder can't be written."""
    worker = _origin("muster.worker").parent
    hidden = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(worker, folder / "muster" / "worker", ignore=hidden, dirs_exist_ok=True)
    (folder / "muster" / "__init__.py").write_text(INIT)
    (folder / "__main__.py").write_text(MAIN)
    (folder / HOOK / "muster").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_origin("muster.run"), folder / HOOK / "muster" / "run.py")


def _origin(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is part of this installation"
    assert spec.origin is not None, f"{module} is a file"
    return Path(spec.origin)
