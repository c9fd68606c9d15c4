"""Make `.venv` hold what pyproject.toml asks for, and do nothing when it already does.

    python3 tools/setup_venv.py run     # what `make demo`, `make up` and `make docs` need
    python3 tools/setup_venv.py dev     # the same and the test tools

This file runs on the bare interpreter before anything is installed. It uses the standard library only, and syntax that
a Python too old for Muster still parses, so that it can say so instead of raising a SyntaxError.
"""

import hashlib
import json
import os
import subprocess
import sys

PYTHON_MIN = (3, 11)
EXTRAS = {"run": ["all", "docs"], "dev": ["all", "docs", "dev"]}
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class SetupError(Exception):
    """Set-up can't go on; the message says why and what to do."""


def main(arguments):
    if len(arguments) != 1 or arguments[0] not in EXTRAS:
        print("usage: setup_venv.py run|dev", file=sys.stderr)
        return 2
    try:
        set_up(EXTRAS[arguments[0]])
    except SetupError as error:
        print(f"muster set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmuster set-up: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def set_up(extras):
    if sys.version_info < PYTHON_MIN:
        raise SetupError(
            f"Muster needs Python {version(PYTHON_MIN)} or newer, and {sys.executable} is "
            f"{version(sys.version_info[:3])}. Name a newer one: make PYTHON=python3.12 …"
        )
    if is_installed(extras):
        return
    import fcntl  # here, because an old Python must be refused first on every system

    # Two makes in one folder, such as `make test` beside `make demo`, install once.
    with open(path(".venv.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_installed(extras):
            create_venv()
            install(extras)


def is_installed(extras):
    try:
        with open(path(".venv", "muster-installed.json")) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return False
    return stamp["fingerprint"] == fingerprint() and set(extras) <= set(stamp["extras"]) and runs("--version")


def fingerprint():
    """What an installation depends on: the requirements, and the place, which an editable installation names."""
    with open(path("pyproject.toml"), "rb") as file:
        return hashlib.sha256(file.read() + ROOT.encode()).hexdigest()


def create_venv():
    """Make the virtual environment, also in place of one whose interpreter is gone, as after a system upgrade."""
    venv = path(".venv")
    if runs("-m", "pip", "--version"):
        return
    # Only what `python -m venv` made may be thrown away; a folder with anything else in it is somebody's.
    if os.path.lexists(venv) and os.listdir(venv) and not os.path.exists(path(".venv", "pyvenv.cfg")):
        raise SetupError(f"{venv} exists and is not a virtual environment. Move it away and try again.")
    print(f"muster set-up: new virtual environment in {venv} (Python {version(sys.version_info[:3])})", flush=True)
    if subprocess.call([sys.executable, "-m", "venv", "--clear", venv]) != 0:
        raise SetupError(
            f"'{sys.executable} -m venv' failed; its message is above. On Debian and Ubuntu it needs "
            f"`apt install python{version(sys.version_info[:2])}-venv`. Or name another Python: make PYTHON=…"
        )


def install(extras):
    requirement = f".[{','.join(extras)}]"
    print(f"muster set-up: installing {requirement}; the first time takes a minute or more", flush=True)
    # Not compiled: to compile all that is installed takes longer than to compile what is used when it is first used.
    if not runs("-m", "pip", "install", "--quiet", "--no-compile", "--editable", requirement, output=None):
        raise SetupError(
            "pip could not install the requirements; its message is above. It needs the package registry, or wheels "
            "named by PIP_FIND_LINKS, and about 3 GB of free disk. The next run tries again."
        )
    if not runs("-m", "pip", "check", output=None):
        raise SetupError("the installed packages contradict each other, as said above")
    # Last, and in one step: a stamp is only there when everything is.
    stamp = path(".venv", "muster-installed.json")
    with open(stamp + ".new", "w") as file:
        json.dump({"extras": extras, "fingerprint": fingerprint()}, file)
    os.replace(stamp + ".new", stamp)


def runs(*arguments, output=subprocess.DEVNULL):
    """Whether the environment's Python succeeds with these arguments; False where there is no such Python."""
    try:
        command = [path(".venv", "bin", "python"), *arguments]
        return subprocess.call(command, cwd=ROOT, stdout=output, stderr=output) == 0
    except OSError:
        return False


def path(*parts):
    return os.path.join(ROOT, *parts)


def version(parts):
    return ".".join(str(part) for part in parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
