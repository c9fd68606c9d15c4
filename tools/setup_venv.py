"""Make `.venv` hold what pyproject.toml asks for, and do nothing when it already does.

    python3 tools/setup_venv.py run     # what `make demo` and `make up` need
    python3 tools/setup_venv.py dev     # the same and the test tools

Runs on the bare interpreter before anything is installed: standard library only, and syntax that a Python too old
for Muster still parses, so that it can say so instead of raising a SyntaxError.
"""

import collections
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

PYTHON_MIN = (3, 11)
EXTRAS = {"run": ["all"], "dev": ["all", "dev"]}
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What the processes of each extra load, side by side on two cores.
LOADED = {
    "all": (
        "muster.trainer.loop, muster.trainer.checkpoint.s3_store, torch.distributed.run, torch.distributed.fsdp, "
        "torch._dynamo, botocore.session, botocore.client",
        "muster.cli.main, muster.api.app, muster.api.migrate, muster.agent.server, muster.operator.local.service, "
        "muster.operator.kubernetes.service, uvicorn.protocols.http.h11_impl, rich.live, aiosqlite, asyncpg",
    ),
    "dev": ("pytest, xdist, hypothesis, schemathesis, moto.server, boto3.session",),
}
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "muster-installed.json")
LOCK = os.path.join(ROOT, ".venv.lock")


class SetupError(Exception):
    """Set-up can't go on; the message says why and what to do."""


def main(arguments):
    if len(arguments) != 1 or arguments[0] not in EXTRAS:
        print("usage: setup_venv.py run|dev", file=sys.stderr)
        return 2
    wanted = EXTRAS[arguments[0]]
    try:
        refuse_old_python()
        if is_installed(wanted):
            return 0
        with Lock():
            if is_installed(wanted):  # another make did it while this one waited
                return 0
            create_venv()
            install(wanted)
    except SetupError as error:
        print(f"muster set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmuster set-up: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def refuse_old_python():
    if sys.version_info >= PYTHON_MIN:
        return
    raise SetupError(
        f"Muster needs Python {version(PYTHON_MIN)} or newer, and {sys.executable} is {version(sys.version_info[:3])}. "
        f"Name a newer one: make PYTHON=python3.12 …"
    )


def fingerprint():
    """What an installation depends on: the requirements and the place (an editable install names its folder)."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        requirements = file.read()
    return hashlib.sha256(requirements + ROOT.encode()).hexdigest()


def is_installed(wanted):
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return False
    fresh = stamp["fingerprint"] == fingerprint() and set(wanted) <= set(stamp["extras"])
    return fresh and venv_version() is not None


def venv_version():
    """The version of the virtual environment's Python as (major, minor), or None when it doesn't start.

    An environment outlives the interpreter that it points to, for example after a system upgrade.
    """
    try:
        answer = subprocess.run(
            [VENV_PYTHON, "-c", "import sys; print(*sys.version_info[:2])"], stdout=subprocess.PIPE, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def create_venv():
    found = venv_version()
    if found is not None and found >= PYTHON_MIN and has_pip():
        return
    if os.path.lexists(VENV):
        # Only what `python -m venv` made may be thrown away; a folder with anything else in it is somebody's.
        if not os.path.exists(os.path.join(VENV, "pyvenv.cfg")) and os.listdir(VENV):
            raise SetupError(f"{VENV} exists and is not a virtual environment. Move it away and try again.")
        print(f"muster set-up: {VENV} is unusable, making it anew", flush=True)
        shutil.rmtree(VENV)
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            raise SetupError(
                f"{sys.executable} has no '{module}' module, so it can't make a virtual environment with pip. "
                f"On Debian and Ubuntu: apt install python{version(sys.version_info[:2])}-venv. "
                f"Or name another Python: make PYTHON=/path/to/python3 …"
            ) from None
    print(f"muster set-up: new virtual environment in {VENV} (Python {version(sys.version_info[:3])})", flush=True)
    if subprocess.call([sys.executable, "-m", "venv", VENV]) != 0:
        raise SetupError(f"'{sys.executable} -m venv {VENV}' failed; its output is above")


def has_pip():
    return subprocess.call([VENV_PYTHON, "-m", "pip", "--version"], stdout=subprocess.DEVNULL) == 0


def install(wanted):
    requirement = f".[{','.join(wanted)}]"
    print(f"muster set-up: installing {requirement}; the first time takes a minute or more", flush=True)
    began = time.monotonic()
    pip = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check"]
    if not run_showing_the_last_line([*pip, "install", "--no-compile", "--retries", "5", "--editable", requirement]):
        raise SetupError(
            "pip could not install the requirements (its message is above). It needs the package registry, "
            "or wheels named by PIP_FIND_LINKS, and about 3 GB of free disk. The next run tries again."
        )
    if subprocess.call([*pip, "check"], stdout=subprocess.DEVNULL) != 0:
        raise SetupError(f"the installed packages contradict each other: {VENV_PYTHON} -m pip check says how")
    compile_what_is_used(wanted)
    # Last, and in one step: a stamp is only there when everything is.
    with open(STAMP + ".new", "w") as file:
        json.dump({"extras": wanted, "fingerprint": fingerprint()}, file)
    os.replace(STAMP + ".new", STAMP)
    print(f"muster set-up: ready after {time.monotonic() - began:.0f} s", flush=True)


def compile_what_is_used(wanted):
    """Have what our processes load compiled once, by loading it. To compile all that was installed takes longer, and
    some environments forbid the dozens of processes that will read it in a minute to write down what they compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    commands = [[VENV_PYTHON, "-P", "-c", f"import {names}"] for extra in wanted for names in LOADED[extra]]
    for process in [subprocess.Popen(command, cwd=ROOT, env=environment) for command in commands]:
        if process.wait() != 0:
            raise SetupError("what was installed can't be loaded (its message is above)")


def run_showing_the_last_line(command):
    """Run it with its newest line of output on the terminal; its last lines are printed when it fails."""
    columns = shutil.get_terminal_size().columns
    tail = collections.deque(maxlen=30)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    for line in process.stdout:
        tail.append(line.rstrip())
        if sys.stdout.isatty():
            print(f"\r\033[K  {tail[-1].strip()[: columns - 3]}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
    if process.wait() != 0:
        print("\n".join(tail), file=sys.stderr)
    return process.returncode == 0


class Lock:
    """Two makes in one folder, such as `make test` beside `make demo`, install once."""

    def __enter__(self):
        import fcntl  # here, because the refusal of an old Python must come first on every system

        self.file = open(LOCK, "w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("muster set-up: waiting for another set-up in this folder", flush=True)
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self.file.close()


def version(parts):
    return ".".join(str(part) for part in parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
