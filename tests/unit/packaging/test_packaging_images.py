"""The images' locks hold what pyproject.toml asks for, and torch is in one of them only."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from tests.tidy.repository import ROOT
from tests.unit.packaging.conftest import tool

IMAGES = {"services": ("api", "cli", "agent"), "operator": ("operator",), "trainer_image": ("trainer",)}


def lock(image: str) -> dict[str, set[str]]:
    """Name → versions; there are several where a marker chooses."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / image / "requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition(";")[0].strip().partition("==")
            found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_is_what_the_extra_asks_for(image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"]]
    for extra in IMAGES[image]:
        lines += project["optional-dependencies"][extra]
    locked = lock(image)
    wanted = [Requirement(line) for line in lines]
    stale = [
        f"{need} (locked: {', '.join(sorted(locked.get(need.name, ()))) or 'not at all'})"
        for need in wanted
        if not locked.get(need.name) or not all(need.specifier.contains(version) for version in locked[need.name])
    ]
    assert stale == [], "make the lock again, as its first lines say"


def test_only_the_trainers_image_holds_torch() -> None:
    assert [image for image in IMAGES if "torch" in lock(image)] == ["trainer_image"]
    assert [image for image in IMAGES if "fastapi" in lock(image)] == ["services"]


def test_the_efa_base_is_the_one_that_is_documented() -> None:
    text = (ROOT / "trainer_image" / "efa.Dockerfile").read_text()
    (version,) = re.findall(r"^ARG EFA_INSTALLER_VERSION=(.*)$", text, re.MULTILINE)
    told = (ROOT / "docs" / "install.md").read_text()
    assert f"EFA installer {version}" in told
    (torch,) = lock("trainer_image")["torch"]
    assert f"torch {torch}" in told
    assert [name for name in lock("trainer_image") if name.startswith("nvidia-nccl-cu13")], "CUDA 13, as is told there"


@pytest.mark.parametrize("extra", ["operator", "services"])
def test_images_share_versions_where_they_meet(extra: str) -> None:
    """The trainer's image takes in the packages of another one: docker-compose.yml's operator, an API that exports."""
    added, trainer = lock(extra), lock("trainer_image")
    assert {name for name in added.keys() & trainer.keys() if added[name] != trainer[name]} == set()
    text = (ROOT / "trainer_image" / "Dockerfile").read_text()
    assert f"COPY {extra}/requirements.txt {extra}/" in text


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_number_that_is_not_root(image: str) -> None:
    """Kubernetes can't tell whether a name is root's, and refuses it where runAsNonRoot is asked for."""
    text = (ROOT / image / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000:1000"]
    assert re.findall(r"^ARG BASE_IMAGE=(.*)$", text, re.MULTILINE) == ["docker.io/library/python:3.13.9-slim-trixie"]
    assert "ADD " not in text
    assert re.search(r"hatchling==\d", text)


def test_the_base_of_debians_packages_is_of_the_release_that_the_dockerfiles_name() -> None:
    python, release = tool("make_base_image").named_base()
    for image in IMAGES:
        (base,) = re.findall(r"^ARG BASE_IMAGE=(.*)$", (ROOT / image / "Dockerfile").read_text(), re.MULTILINE)
        assert re.fullmatch(rf"docker.io/library/python:{python}\.\d+-slim-{release}", base), image
