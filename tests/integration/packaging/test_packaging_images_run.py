"""The images as a cluster runs them: a random user of group 0, a root that can't be written, no capabilities.

They are those that `make images` left with buildah; runc runs them, so no daemon is needed.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.packaging.images import missing, mounted

USER = 54_321
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("runc") is None, reason="runc and root are needed"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "the images are there"),
]
LOCKED = """
import importlib.util, os
assert (os.getuid(), os.getgid()) == (54321, 0)
assert "CapEff:\\t0000000000000000" in open("/proc/self/status").read()
for place in ("/", "/opt/muster", "/usr"):
    try:
        open(place + "/x", "w")
        raise SystemExit(place + " can be written")
    except OSError as error:
        assert error.errno == 30, error
print("torch" if importlib.util.find_spec("torch") else "no torch")
"""
API = """
import json, os, subprocess, sys, time, urllib.request
server = subprocess.Popen([sys.executable, "-m", "muster.api"], stdout=subprocess.DEVNULL)
for _ in range(600):
    try:
        with urllib.request.urlopen("http://127.0.0.1:8642/readyz", timeout=5) as reply:
            break
    except OSError:
        assert server.poll() is None
        time.sleep(0.1)
os.environ["MUSTER_TOKEN"] = open("/tmp/state/admin-token").read().strip()
os.environ["MUSTER_SERVER"] = "http://127.0.0.1:8642"
subprocess.run(["muster", "ls"], check=True)
server.terminate()
sys.exit(server.wait())
"""
TRAINER = """
import os, subprocess, sys
code = subprocess.run([sys.executable, "-m", "muster.trainer.launch"]).returncode
print(sorted(os.listdir("/tmp/commits/commits")))
sys.exit(code)
"""
JOB = {
    "training": {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 64},
        "length": {"steps": 3},
    },
    "checkpoint": {"every": 3},
}
ORDERS = {
    "MUSTER_JOB": "smoke", "MUSTER_JOB_UID": "smoke", "MUSTER_ATTEMPT": "1", "MUSTER_RESUME_STEP": "0",
    "MUSTER_CHECKPOINT_URI": "file:///tmp/commits", "MUSTER_CONFIG": json.dumps(JOB),
    "MUSTER_WORKER_DIR": "/tmp/worker", "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip


class Container:
    """root: the image's files, mounted. configuration: what the image says of itself."""

    def __init__(self, name: str, root: Path, configuration: dict[str, Any], bundle: Path) -> None:
        self._name, self._root, self._configuration, self._bundle = name, root, configuration, bundle

    def run(self, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        subprocess.run(["runc", "spec", "--bundle", self._bundle], check=True)
        path = self._bundle / "config.json"
        spec = json.loads(path.read_text())
        spec["root"] = {"path": str(self._root), "readonly": True}
        spec["process"] |= {
            "terminal": False, "user": {"uid": USER, "gid": 0}, "args": list(words), "capabilities": {},
            "cwd": self._configuration["WorkingDir"], "noNewPrivileges": True,
            "env": [*self._configuration["Env"], *(f"{key}={value}" for key, value in environment.items())],
        }  # fmt: skip
        spec["mounts"].append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]})
        path.write_text(json.dumps(spec))
        path = self._bundle / "config.json"
        try:
            return subprocess.run(
                ["runc", "run", "--bundle", self._bundle, self._name],
                capture_output=True, text=True, check=False, timeout=150, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            subprocess.run(["runc", "delete", "--force", self._name], check=False, capture_output=True)
            path.unlink()


@pytest.fixture
def container(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Container]:
    with mounted(f"localhost/muster-{request.param}") as (root, configuration):
        yield Container(f"muster-smoke-{os.getpid()}-{request.param}", root, configuration, tmp_path)


@pytest.mark.parametrize(
    ("container", "torch"),
    [("operator", "no torch"), ("services", "no torch"), ("trainer", "torch")],
    indirect=["container"],
)
def test_nothing_can_be_written_and_only_the_trainer_has_torch(container: Container, torch: str) -> None:
    done = container.run("python", "-c", LOCKED)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{torch}\n", "")


@pytest.mark.parametrize("container", ["operator"], indirect=True)
def test_the_operator_says_what_it_misses(container: Container) -> None:
    done = container.run("muster-operator", "--world", "kubernetes")
    assert done.returncode not in (0, 1)
    assert "no cluster" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("container", ["services"], indirect=True)
def test_the_api_gets_ready_and_the_command_line_finds_it(container: Container) -> None:
    done = container.run("python", "-c", API, MUSTER_API_STATE="/tmp/state")
    assert done.returncode == 0, done.stderr
    assert "No jobs." in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("container", ["trainer"], indirect=True)
def test_the_trainer_trains_to_a_commit(container: Container) -> None:
    done = container.run("python", "-c", TRAINER, **ORDERS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "['step-00000003.json']"
