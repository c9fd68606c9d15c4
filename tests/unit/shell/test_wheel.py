"""The wheel holds every room, nothing else, and works where no checkout is."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from tests.tidy.repository import ROOMS

ROOT = Path(__file__).parents[3]
SOURCE_ROOTS = ("services", "operator", "trainer_image")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_its_types(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT / source_root))
        for source_root in SOURCE_ROOTS
        for path in (ROOT / source_root / "muster").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert expected <= packed
    assert {name.split("/")[0] for name in packed} == {"muster"}
    assert {name.split("/")[1] for name in packed} == {*ROOMS, "run.py"}  # `muster.run` is one file for users' programs
    assert {f"muster/{room}/py.typed" for room in ROOMS} <= packed


def test_the_wheel_works_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    """Unpacked and put first on the path, every room comes from the wheel, the namespace still whole."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # The editable installation is on the path too; a regular package in the wheel would hide it, a namespace does not.
    program = f"import muster.{', muster.'.join(sorted(ROOMS))}, sys\n" + "".join(
        f"assert muster.{room}.__file__.startswith(sys.argv[1]), muster.{room}.__file__\n" for room in sorted(ROOMS)
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
    )


def test_the_wheel_brings_the_schemas_history_and_the_demos_job(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "from muster.api.core.database.migrate import migrations_folder\n"
        "from muster.cli.demo import find_example\n"
        "print(migrations_folder(), find_example(None), sep='\\n')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd="/",  # not the checkout, which has both
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    migrations, example = map(Path, result.stdout.split())
    assert migrations.is_relative_to(tmp_path)
    assert example.is_relative_to(tmp_path)
    versions = {path.name for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert {path.name for path in (migrations / "versions").glob("*.py")} == versions


def test_the_editable_installation_copies_nothing() -> None:
    """A copy in site-packages would be found beside the checkout, and grow stale."""
    assert list((Path(sysconfig.get_path("purelib")) / "muster").rglob("*.*")) == []


def test_the_commands_of_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert archive.read(entry_points).decode().split() == [
        "[console_scripts]",
        "muster", "=", "muster.cli.main:main",
        "muster-operator", "=", "muster.operator.__main__:main",
    ]  # fmt: skip
