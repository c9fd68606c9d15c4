"""The modules stand where the architecture puts them, and show their types."""

from pathlib import Path

import pytest
from tests.tidy.repository import ROOMS, ROOT, SOURCE_ROOTS, expect_none, plant

# A program of a user's own imports it in an image that holds nothing else of Muster.
USERS_MODULE = "services/muster/run.py"


def misplaced(root: Path) -> list[str]:
    """Files that would shadow the standard library's `operator` or close the namespace, and rooms that stand twice."""
    faults = [
        f"{path.relative_to(root)}: {source_root}/ is a source root, never a package; Python modules go into muster/"
        for source_root in SOURCE_ROOTS
        for path in sorted((root / source_root).glob("*.py"))
    ]
    for source_root in SOURCE_ROOTS:
        namespace = root / source_root / "muster"
        faults += [
            f"{path.relative_to(root)}: muster is a namespace over three source roots, so it holds rooms and no modules"
            for path in sorted(namespace.glob("*.py"))
            if str(path.relative_to(root)) != USERS_MODULE
        ]
        faults += [
            f"{path.relative_to(root)}: not a room; the rooms are {', '.join(ROOMS)}"
            for path in sorted(namespace.glob("*/"))
            if path.name not in ROOMS and path.name != "__pycache__"
        ]
    for room in ROOMS:
        places = [f"{base}/muster/{room}" for base in SOURCE_ROOTS if (root / base / "muster" / room).is_dir()]
        if len(places) > 1:
            faults.append(f"room '{room}' stands in {' and '.join(places)}; only one of them would be imported")
    return faults


def untyped_rooms(root: Path) -> list[str]:
    """Rooms whose types nobody outside would see (PEP 561: a namespace package marks each part)."""
    rooms = [path for base in SOURCE_ROOTS for path in (root / base / "muster").glob("*/") if path.name in ROOMS]
    return [
        f"{room.relative_to(root)}: py.typed is missing" for room in sorted(rooms) if not (room / "py.typed").exists()
    ]


def test_rooms_stand_where_the_plan_puts_them() -> None:
    expect_none(misplaced(ROOT))


def test_every_room_shows_its_types() -> None:
    expect_none(untyped_rooms(ROOT))


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("operator/helpers.py", "operator/helpers.py: operator/ is a source root"),
        ("operator/__init__.py", "operator/__init__.py: operator/ is a source root"),
        ("services/muster/__init__.py", "services/muster/__init__.py: muster is a namespace"),
        ("services/muster/billing/__init__.py", "services/muster/billing: not a room"),
        (
            "trainer_image/muster/api/__init__.py",
            "room 'api' stands in services/muster/api and trainer_image/muster/api",
        ),
    ],
)
def test_a_misplaced_file_is_found(tmp_path: Path, planted: str, fault: str) -> None:
    plant(tmp_path, {"services/muster/api/__init__.py": "", "operator/muster/operator/__init__.py": ""})
    assert misplaced(tmp_path) == []
    plant(tmp_path, {planted: ""})
    assert [found[: len(fault)] for found in misplaced(tmp_path)] == [fault]


def test_a_room_without_types_is_found(tmp_path: Path) -> None:
    plant(tmp_path, {"services/muster/api/__init__.py": "", "services/muster/cli/py.typed": ""})
    assert untyped_rooms(tmp_path) == ["services/muster/api: py.typed is missing"]
