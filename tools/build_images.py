"""Build the three images with whatever builds images here: python tools/build_images.py [--registry R] [OPTION…]

OPTIONs go to each build as they are, e.g. --build-arg PIP_INDEX_URL=https://mirror.example.com/simple --push.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {"muster-operator": "operator", "muster-services": "services", "muster-trainer": "trainer_image"}
TRAINERS = ("TORCH", "TORCH_INDEX_URL", "EXTRA", "APT_PACKAGES")  # build arguments that the other two would not know


def builder() -> list[str]:
    """docker and podman where they work, for docker's client may be there without its server; else buildah."""
    for program in ("docker", "podman"):
        if (
            shutil.which(program)
            and subprocess.run([program, "info"], capture_output=True, check=False).returncode == 0
        ):
            return [program, "build"]
    if shutil.which("buildah"):
        return ["buildah", "build"]
    sys.exit(
        "nothing here builds images: docker, podman and buildah are not installed, or their server does not answer"
    )


def options_of(image: str, options: list[str]) -> list[str]:
    """The build arguments of the trainer's image are left out of the others."""
    kept: list[str] = []
    for option in options:
        if image != "muster-trainer" and kept[-1:] == ["--build-arg"] and option.partition("=")[0] in TRAINERS:
            kept.pop()
        else:
            kept.append(option)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description="Build Muster's three images.")
    parser.add_argument("--registry", default="localhost", help="in front of each name, e.g. registry.example.com/ml")
    given, options = parser.parse_known_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for image, folder in IMAGES.items():
        name = f"{given.registry.rstrip('/')}/{image}:{version}"
        command = [*builder(), *options_of(image, options), "--file", f"{folder}/Dockerfile", "--tag", name, "."]
        print(" ".join(command), flush=True)
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
