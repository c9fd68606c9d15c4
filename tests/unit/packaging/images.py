"""The three images where buildah keeps them, as `make images` leaves them there."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMAGES = ("localhost/muster-operator", "localhost/muster-services", "localhost/muster-trainer")
TAG = "0.1.0"


def missing() -> str:
    """Why there are none; empty if all are there."""
    if shutil.which("buildah") is None:
        return "buildah is not installed"
    absent = [image for image in IMAGES if _buildah("inspect", "--type=image", f"{image}:{TAG}", check=False)]
    return f"buildah has no {', '.join(absent)}: `make images` builds them" if absent else ""


def save(folder: Path, others: dict[str, str]) -> list[Path]:
    """An archive of each, for containerd. others: {"pause": name} adds an image that sleeps."""
    if name := others.get("pause"):
        container = _output("from", f"{IMAGES[0]}:{TAG}")
        _buildah("config", "--entrypoint", '["sleep", "infinity"]', "--cmd", "", container)
        _buildah("commit", "--rm", container, name)
    archives = []
    for image in (*(f"{image}:{TAG}" for image in IMAGES), *others.values()):
        archives.append(folder / f"{image.rpartition('/')[2].replace(':', '-')}.tar")
        _buildah("push", image, f"docker-archive:{archives[-1]}:{image}")
    return archives


def _buildah(*words: str, check: bool = True) -> int:
    return subprocess.run(["buildah", *words], check=check, capture_output=True).returncode


def _output(*words: str) -> str:
    return subprocess.run(["buildah", *words], check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def mounted(image: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(its files, its configuration)."""
    container = _output("from", f"{image}:{TAG}")
    try:
        inspected = json.loads(_output("inspect", container))
        yield Path(_output("mount", container)), inspected["OCIv1"]["config"]
    finally:
        _buildah("rm", container)
