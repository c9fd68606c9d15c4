"""Make the base image of Muster's images from Debian's packages, where no registry of images is reached.

    python tools/make_base_image.py
    make images ARGS='--build-arg BASE_IMAGE=localhost/python:3.13-trixie'

It is of the Debian release that the Dockerfiles' own base is of, and so has the same minor version of Python. Needs
mmdebstrap, buildah and root.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = "python3,python3-venv,ca-certificates"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def named_base() -> tuple[str, str]:
    """(minor version of Python, Debian's release) that the operator's Dockerfile names."""
    dockerfile = (ROOT / "operator" / "Dockerfile").read_text()
    found = re.search(r"^ARG BASE_IMAGE=\S+/python:(\d+\.\d+)\.\d+-slim-(\w+)$", dockerfile, re.MULTILINE)
    assert found is not None, "operator/Dockerfile names another kind of base image"
    return found[1], found[2]


def main() -> int:
    python, release = named_base()
    parser = argparse.ArgumentParser(description="Make a base image from Debian's packages.")
    parser.add_argument("--tag", default=f"localhost/python:{python}-{release}", help="default %(default)s")
    parser.add_argument("--certificates", metavar="FILE", help="trusted ones, where a proxy of yours signs; PEM")
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{folder}/base.tar"
            _run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", release, archive)
            container = _run("buildah", "from", "scratch")
            _run("buildah", "add", container, archive, "/")
            _run("buildah", "config", "--env", f"PATH={PATHS}", container)
            if given.certificates:
                _run("buildah", "copy", container, given.certificates, CERTIFICATES)
                _run("buildah", "config", "--env", f"PIP_CERT={CERTIFICATES}", container)
            _run("buildah", "commit", "--rm", container, given.tag)
    except FileNotFoundError as error:
        print(f"{error.filename} is not installed: apt-get install mmdebstrap buildah", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)}: {error.stderr.strip()}", file=sys.stderr)
        return 1
    print(f"make images ARGS='--build-arg BASE_IMAGE={given.tag}'")
    return 0


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
