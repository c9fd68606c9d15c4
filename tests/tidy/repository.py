"""Where this repository is and what is in it: the ground that every tidiness check stands on."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("services", "operator", "trainer_image")
# Rooms that others share, and by whom they are used: what they import must be in the extra of each.
SHARED = {
    "charts": ("api", "cli"),
    "documents": ("api", "agent", "cli", "operator"),
    "kube": ("api", "agent", "operator"),
    "storage": ("api", "operator", "trainer"),
    "local": ("api", "cli", "operator", "trainer"),
    "secrets": ("api", "operator"),
    "web": ("api",),  # served by the same process
}
# The floor under all packages, the upper ones first: each may import those after it.
BOOKS = ("replies", "plan", "recipe", "words")
ROOMS = (*BOOKS, *SHARED, "api", "client", "cli", "agent", "operator", "trainer", "worker")
CODE_FOLDERS = (*SOURCE_ROOTS, "tests", "tools", "benchmarks", "migrations", "examples")


def python_files(root: Path, *folders: str) -> list[Path]:
    """Every Python file under the folders, in a stable order."""
    found = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(path for path in found if "__pycache__" not in path.parts)


def committed_files(root: Path) -> list[Path]:
    """Files that are in git or would be added by `git add .`, so that a slip shows before the commit."""
    answer = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    names = answer.stdout.decode().split("\0")
    return sorted(root / name for name in names if name and (root / name).is_file())


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported_names(tree: ast.AST, package: str = "") -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; `from a import b` yields both `a` and `a.b`, for b may be a module.

    `package` is the dotted package that relative imports count from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, package)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - (node.level - 1)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write a small tree for a check to find fault with."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def expect_none(faults: list[str]) -> None:
    """Fail with every fault on a line of its own."""
    __tracebackhide__ = True
    assert not faults, f"{len(faults)} faults:\n  " + "\n  ".join(faults)
