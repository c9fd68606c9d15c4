"""No dead files: whatever stands under the source roots is reached from a command, a process or a test."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.repository import (
    CODE_FOLDERS,
    ROOT,
    SOURCE_ROOTS,
    expect_none,
    imported_names,
    parse,
    plant,
    python_files,
)

# `python -m muster.trainer`, `uvicorn muster.api.app:create`: a module that is started by name and never imported.
STARTED_BY_NAME = re.compile(r"(muster(?:\.\w+)+)(?::\w+)?")


def dead_modules(root: Path) -> list[str]:
    """Modules that nothing reaches from the entry points; two dead files that import each other are both dead."""
    modules = module_files(root)
    reached: set[str] = set()
    waiting = [name for name in entry_points(root) if name in modules]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        is_package = modules[name].name == "__init__.py"
        package = name if is_package else name.rpartition(".")[0]
        waiting += [other for other in mentioned(parse(modules[name]), package) if other in modules]
        if package in modules:
            waiting.append(package)  # importing a.b.c runs a/__init__.py and a/b/__init__.py
    return sorted(f"{modules[name].relative_to(root)}: nothing reaches {name}" for name in modules.keys() - reached)


def module_files(root: Path) -> dict[str, Path]:
    """Dotted name → file for every module under the source roots."""
    files = {}
    for source_root in SOURCE_ROOTS:
        for path in python_files(root, source_root):
            parts = path.relative_to(root / source_root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def mentioned(tree: ast.Module, package: str = "") -> Iterator[str]:
    """Modules that the file imports or starts by name, with `python -m package` meaning its __main__."""
    for _, name in imported_names(tree, package):
        yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = STARTED_BY_NAME.fullmatch(node.value)
            if match:
                yield match.group(1)
                yield f"{match.group(1)}.__main__"


def entry_points(root: Path) -> Iterator[str]:
    """Console scripts, rooms (whose `__init__` stands for the room) and everything that tests and tools use."""
    project = tomllib.loads((root / "pyproject.toml").read_text()).get("project", {})
    for target in project.get("scripts", {}).values():
        yield target.partition(":")[0]
    for name, path in module_files(root).items():
        if path.name == "__init__.py" and name.count(".") == 1:
            yield name
        if path.name == "sitecustomize.py":  # Python imports it by itself
            yield name
    for path in python_files(root, *(folder for folder in CODE_FOLDERS if folder not in SOURCE_ROOTS)):
        yield from mentioned(parse(path))
    # Dockerfiles and Helm templates start modules too.
    for path in [*root.glob("*/Dockerfile"), *root.glob("helm/**/*.yaml"), *root.glob("docker-compose.yml")]:
        for name in STARTED_BY_NAME.findall(path.read_text()):
            yield name
            yield f"{name}.__main__"


def test_no_module_is_dead() -> None:
    assert len(module_files(ROOT)) > 6
    expect_none(dead_modules(ROOT))


def test_dead_modules_are_found(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "pyproject.toml": '[project.scripts]\nmuster = "muster.cli.main:app"\n',
            "services/muster/cli/__init__.py": "",
            "services/muster/cli/main.py": "from . import show\nstart('muster.api.app:create')\n",
            "services/muster/cli/show.py": "",
            "services/muster/cli/forgotten.py": "from muster.cli import friend\n",
            "services/muster/cli/friend.py": "from muster.cli import forgotten\n",
            "services/muster/api/__init__.py": "",
            "services/muster/api/app.py": "def create():\n    from muster.api.jobs.routes import router\n",
            "services/muster/api/jobs/__init__.py": "",
            "services/muster/api/jobs/routes.py": "",
            "services/muster/api/jobs/old.py": "",
            "trainer_image/muster/trainer/__init__.py": "",
            "trainer_image/muster/trainer/__main__.py": "import muster.trainer.loop\n",
            "trainer_image/muster/trainer/loop.py": "",
            "tests/unit/test_loop.py": "COMMAND = ['-m', 'muster.trainer']\n",
            "tests/unit/test_note.py": '"""About muster.api.jobs.old: a word in a text is no use of it."""\n',
        },
    )
    assert dead_modules(tmp_path) == [
        "services/muster/api/jobs/old.py: nothing reaches muster.api.jobs.old",
        "services/muster/cli/forgotten.py: nothing reaches muster.cli.forgotten",
        "services/muster/cli/friend.py: nothing reaches muster.cli.friend",
    ]
