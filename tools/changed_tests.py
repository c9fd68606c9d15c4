"""Print the test files that a change can reach, for `make test-changed`.

A change is every file that differs from the merge base with `--base`, committed or not. A test file is reached through
what it imports, directly or not, and through the modules that it names in a string, which it starts as processes or
patches; those may start others. A file that is no Python reaches the files that name it or one of its folders.
The tests of tests/tidy look at the whole tree and always run. Names that are put together at run time are not seen: the
build server runs everything.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("services", "operator", "trainer_image")
# A change of these can reach every test.
EVERYTHING = {"pyproject.toml", "Makefile", "tests/conftest.py", "tests/polling.py"}
ALWAYS = "tests/tidy"
# Folders whose names are also everybody's words.
COMMON = {"muster", "tests", "docs", "integration", "unit", *SOURCES}


@dataclass
class Names:
    """The modules that a Python file imports, and the text of its strings."""

    imports: set[str]
    strings: set[str]

    @property
    def started(self) -> set[str]:
        return {text for text in self.strings if re.fullmatch(r"(muster|tests)(\.\w+)+", text)}

    @property
    def parts(self) -> set[str]:
        return {part for text in self.strings for part in text.split("/")}


@cache
def names_in(path: Path) -> Names:
    imports: set[str] = set()
    strings: set[str] = set()
    logs: set[int] = set()  # strings that name nothing but a log
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("getLogger", "get_logger"):
            logs |= {id(argument) for argument in node.args}
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in logs:
            strings.add(node.value)
    return Names(imports, strings)


def module_of(path: str) -> str:
    """`services/muster/api/app.py` is `muster.api.app`; a package is named by its folder."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] in SOURCES else parts).removesuffix(".__init__")


def with_parents(modules: Iterable[str]) -> Iterator[str]:
    """The modules and the packages that they are in: to import one is to import those, too."""
    for module in modules:
        words = module.split(".")
        yield from (".".join(words[:count]) for count in range(2, len(words) + 1))


class Reach:
    """The modules of the product that a change reaches: by imports alone, and by imports and processes."""

    def __init__(self, changed: Iterable[str]) -> None:
        with (ROOT / "pyproject.toml").open("rb") as file:
            packages = tomllib.load(file)["tool"]["importlinter"]["root_packages"]
        graph = grimp.build_graph(*packages, cache_dir=None)
        changed = [module for module in changed if module in graph.modules]
        self.imported = self._downstream(graph, changed)
        self.starts: dict[str, set[str]] = {}
        for path in (path for folder in SOURCES for path in (ROOT / folder / "muster").rglob("*.py")):
            module = module_of(str(path.relative_to(ROOT)))
            named = {each for name in names_in(path).started for each in (name, f"{name}.__main__")} & graph.modules
            self.starts[module] = named - {module}
            for name in self.starts[module]:
                graph.add_import(importer=module, imported=name)
        self.started = self._downstream(graph, changed)

    @staticmethod
    def _downstream(graph: grimp.ImportGraph, changed: list[str]) -> set[str]:
        return {*changed, *(found for module in changed for found in graph.find_downstream_modules(module))}

    def includes(self, path: Path) -> bool:
        names = names_in(path)
        named = set(with_parents(names.started)) | {f"{name}.__main__" for name in names.started}
        # A module that the test itself imports is also looked at for the processes that it starts.
        named |= {name for module in names.imports for name in self.starts.get(module, ())}
        return bool(self.imported & set(with_parents(names.imports)) or self.started & named)


def reached(changed: list[str]) -> list[str]:
    """The test files, as paths from the root."""
    python = sorted((ROOT / "tests").rglob("*.py"))
    tests = [path for path in python if path.name.startswith("test_")]
    if EVERYTHING.intersection(changed):
        return sorted(str(path.relative_to(ROOT)) for path in tests)
    data = [Path(path) for path in changed if not path.endswith(".py")]
    words = {word for path in data for word in (path.parts if path.parts[0] not in SOURCES else (path.name,))} - COMMON
    source = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    readers = [str(path.relative_to(ROOT)) for path in source if words & names_in(path).parts]
    reach = Reach(module_of(path) for path in [*changed, *readers] if path.endswith(".py"))
    by_module = {module_of(str(path.relative_to(ROOT))): path for path in python}
    hit = {path for path in python if str(path.relative_to(ROOT)) in changed or words & names_in(path).parts}
    hit |= {path for path in python if reach.includes(path)}
    users = {path: set(_helpers(path, by_module)) for path in python}
    while more := {path for path, helpers in users.items() if path not in hit and helpers & hit}:
        hit |= more
    return sorted(str(path.relative_to(ROOT)) for path in tests if path in hit)


def _helpers(path: Path, by_module: dict[str, Path]) -> Iterator[Path]:
    """The files of tests/ that this one uses: those that it imports or starts, and the conftest.py of its folders."""
    names = names_in(path)
    yield from (by_module[name] for name in names.imports | names.started if name in by_module)
    yield from (folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT / "tests"))


def changed_files(base: str) -> list[str]:
    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()

    since = git("merge-base", base, "HEAD")[0]
    return sorted({*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="main", help="the commit or branch that the change is measured from")
    changed = changed_files(parser.parse_args().base)
    found = [path for path in reached(changed) if not path.startswith(f"{ALWAYS}/")]
    print(f"{len(changed)} files changed; {len(found)} test files can notice, and {ALWAYS}", file=sys.stderr)
    print(" ".join([*found, ALWAYS]))


if __name__ == "__main__":
    main()
