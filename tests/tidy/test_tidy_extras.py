"""A room needs only what its extra brings: the trainer image carries no FastAPI, the API image no torch."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.tidy.repository import (
    BOOKS,
    ROOMS,
    ROOT,
    SHARED,
    SOURCE_ROOTS,
    expect_none,
    imported_names,
    parse,
    plant,
    python_files,
)

# What may not even be loaded, however indirectly, by importing every module of the room.
FOREIGN = {
    **dict.fromkeys(BOOKS, ("torch", "numpy", "fastapi", "sqlalchemy", "uvicorn", "kubernetes", "httpx2", "yaml")),
    "documents": ("torch", "numpy", "fastapi", "sqlalchemy", "uvicorn", "kubernetes", "httpx2"),
    "charts": ("torch", "numpy", "fastapi", "sqlalchemy", "uvicorn", "kubernetes", "httpx2", "aiohttp"),
    "kube": ("torch", "numpy", "fastapi", "sqlalchemy", "uvicorn", "kubernetes", "httpx2", "yaml"),
    "local": ("torch", "numpy", "fastapi", "sqlalchemy", "uvicorn", "kubernetes", "httpx2", "yaml", "aiohttp"),
    "secrets": ("torch", "numpy", "fastapi", "sqlalchemy", "uvicorn", "kubernetes", "httpx2", "yaml", "aiohttp"),
    "storage": ("torch", "numpy", "fastapi", "sqlalchemy", "kubernetes", "botocore"),
    "api": ("torch", "numpy", "kubernetes", "typer", "transformers"),
    "client": (
        "torch",
        "numpy",
        "fastapi",
        "uvicorn",
        "sqlalchemy",
        "kubernetes",
        "typer",
        "rich",
        "pandas",
        "IPython",
    ),
    "cli": ("torch", "numpy", "fastapi", "uvicorn", "sqlalchemy", "kubernetes", "transformers"),
    "agent": ("torch", "numpy", "fastapi", "uvicorn", "sqlalchemy", "kubernetes"),
    "operator": ("torch", "numpy", "fastapi", "uvicorn", "sqlalchemy", "typer"),
    "web": ("torch", "numpy", "kubernetes", "typer", "transformers"),
    "trainer": ("fastapi", "uvicorn", "sqlalchemy", "kubernetes", "typer", "transformers"),
    # It runs in images that hold nothing of Muster and perhaps nothing but Python.
    "worker": ("torch", "numpy", "pydantic", "boto3", "psutil", "yaml", "aiohttp", "fastapi", "kubernetes"),
}

# Extras whose libraries a room imports only where somebody asks for them.
OPTIONAL = {"trainer": ("tensorboard", "wandb", "mlflow")}

# Import names that belong to the documented interface of another distribution, which requires and documents them.
COMPANIONS = {
    "botocore": ["boto3"],  # boto3's exceptions and configuration live there
    "markupsafe": ["jinja2"],  # what its templates are made of
    "pydantic_core": ["pydantic"],
    "starlette": ["fastapi"],
    "typing_extensions": ["pydantic"],
    **{name: [name] for name in ("tensorboard", "wandb")},  # optional, so maybe not installed here
    "mlflow": ["mlflow-skinny"],
    "urllib3": ["boto3", "kubernetes"],  # its exceptions come through both unwrapped
}

IMPORT_ALL = """
import importlib, pkgutil, sys
room = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:]))
print("loaded:", *loaded)
"""


def foreign_modules_loaded(room: str, foreign: Sequence[str], source_roots: Sequence[Path] = ()) -> list[str]:
    """Import every module of the room in a fresh interpreter; return which of `foreign` came along."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, source_roots))}
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, f"muster.{room}", *foreign],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd="/",
    )
    assert result.returncode == 0, f"muster.{room} does not import:\n{result.stderr}"
    return result.stdout.rpartition("loaded:")[2].split()


def undeclared_imports(root: Path, room: str, distributions: Mapping[str, Sequence[str]]) -> list[str]:
    """Imports of the room that neither the base requirements nor the room's extra name.

    `distributions` maps a top-level import name to the distributions that provide it.
    """
    declared = requirements(root, room)
    faults = []
    for source_root in SOURCE_ROOTS:
        for path in python_files(root, f"{source_root}/muster/{room}"):
            for line, name in sorted(imported_names(parse(path), f"muster.{room}")):
                top = name.partition(".")[0]
                providers = {normal(provider) for provider in distributions.get(top, [])}
                if top in sys.stdlib_module_names or top in ("muster", "") or providers & declared:
                    continue
                faults.append(
                    f"{path.relative_to(root)}:{line}: '{top}' is not in the extra '{room}' of pyproject.toml"
                )
    return list(dict.fromkeys(faults))


def requirements(root: Path, room: str) -> set[str]:
    """Distributions that are there where the room is; a shared room is where any of its users is."""
    if room in SHARED:
        return set.intersection(*(requirements(root, user) for user in SHARED[room]))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = (room, *OPTIONAL.get(room, ()))
    lines = [*project["dependencies"], *(line for e in extras for line in project["optional-dependencies"].get(e, []))]
    return {normal(re.split(r"[\[<>=!~; ]", line)[0]) for line in lines}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("room", ROOMS)
def test_importing_a_room_loads_nothing_foreign(room: str) -> None:
    expect_none(foreign_modules_loaded(room, FOREIGN[room]))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_declares_what_it_imports(room: str) -> None:
    distributions = {**importlib.metadata.packages_distributions(), **COMPANIONS}
    expect_none(undeclared_imports(ROOT, room, distributions))


def test_a_foreign_module_is_found(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "services/muster/api/__init__.py": "",
            "services/muster/api/jobs/__init__.py": "",
            "services/muster/api/jobs/service.py": "import muster.api.helper\n",
            "services/muster/api/helper.py": "import wave, sqlite3\n",
        },
    )
    found = foreign_modules_loaded("api", ["wave", "sqlite3", "turtle"], [tmp_path / "services"])
    assert found == ["sqlite3", "wave"]


def test_a_broken_room_is_found(tmp_path: Path) -> None:
    plant(tmp_path, {"services/muster/api/__init__.py": "", "services/muster/api/jobs.py": "import no_such_module\n"})
    with pytest.raises(AssertionError, match=r"muster\.api does not import"):
        foreign_modules_loaded("api", [], [tmp_path / "services"])


def test_an_undeclared_import_is_found(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "pyproject.toml": '[project]\ndependencies = ["pydantic>=2"]\n'
            '[project.optional-dependencies]\napi = ["PyYAML>=6", "sqlalchemy[asyncio]<3"]\ncli = ["rich"]\n',
            "services/muster/api/jobs.py": "import yaml\nimport sqlalchemy.orm\nimport rich.table\nimport absent\n",
        },
    )
    distributions = {"yaml": ["pyyaml"], "pydantic": ["pydantic"], "sqlalchemy": ["SQLAlchemy"], "rich": ["rich"]}
    assert undeclared_imports(tmp_path, "api", distributions) == [
        "services/muster/api/jobs.py:3: 'rich' is not in the extra 'api' of pyproject.toml",
        "services/muster/api/jobs.py:4: 'absent' is not in the extra 'api' of pyproject.toml",
    ]
