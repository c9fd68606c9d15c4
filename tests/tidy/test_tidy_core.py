"""The operator's core is a function of what it is shown: no clock, no dice, no waiting, no outside."""

import ast
from pathlib import Path

import pytest
from tests.tidy.repository import ROOT, expect_none, imported_names, parse, plant, python_files

CORE = "operator/muster/operator/core"

# Everything the core may import. More needs an argument: the simulation replays decisions by seed.
ALLOWED_IMPORTS = {
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "hashlib", "heapq", "itertools", "math", "muster.operator.core",
    "muster.operator.pacing", "muster.words", "operator", "pydantic", "re", "statistics", "string", "textwrap", "types",
    "typing", "typing_extensions",
}  # fmt: skip
# `hash` and `id` differ from one process to the next; the others reach outside.
FORBIDDEN_CALLS = {
    "open",
    "print",
    "input",
    "exec",
    "eval",
    "compile",
    "__import__",
    "globals",
    "hash",
    "id",
    "breakpoint",
}
CLOCKS = {"now", "utcnow", "today"}


def impurities(root: Path) -> list[str]:
    faults = []
    for path in python_files(root, CORE):
        place = path.relative_to(root)
        tree = parse(path)
        package = ".".join(path.relative_to(root / "operator").parts[:-1])
        found = [*_bad_imports(tree, package), *_bad_code(tree)]
        faults += [f"{place}:{line}: {fault}" for line, fault in sorted(found)]
    return faults


def _bad_imports(tree: ast.Module, package: str) -> set[tuple[int, str]]:
    return {
        (line, f"the core may not import {name}")
        for line, name in imported_names(tree, package)
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED_IMPORTS)
        # `from muster import words` names the bare namespace on its way.
        and name not in ("muster", "muster.operator")
    }


def _bad_code(tree: ast.Module) -> list[tuple[int, str]]:
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            faults.append((node.lineno, "the core never waits: no async, no await"))
        elif isinstance(node, ast.Global):
            faults.append((node.lineno, "the core remembers nothing: no global"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            faults.append((node.lineno, f"the core may not call {node.func.id}()"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS:
            faults.append((node.lineno, f"the core is told the time: no .{node.func.attr}()"))
    return faults


def test_the_core_is_pure() -> None:
    assert python_files(ROOT, CORE), f"{CORE} is gone: this check would pass on nothing"
    expect_none(impurities(ROOT))


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import time", "the core may not import time"),
        ("import os.path", "the core may not import os.path"),
        ("from random import choice", "the core may not import random"),
        ("from muster.operator.runner import run", "the core may not import muster.operator.runner"),
        ("from ..runner import run", "the core may not import muster.operator.runner"),
        ("def later():\n    import asyncio", "the core may not import asyncio"),
        ("async def decide():\n    pass", "the core never waits"),
        ("from datetime import datetime\nx = datetime.now()", "the core is told the time: no .now()"),
        ("def f():\n    global seen\n    seen = 1", "the core remembers nothing"),
        ("x = hash('worker')", "the core may not call hash()"),
        ("print('hello')", "the core may not call print()"),
    ],
)
def test_an_impurity_is_found(tmp_path: Path, code: str, fault: str) -> None:
    plant(tmp_path, {f"{CORE}/decide.py": code})
    faults = impurities(tmp_path)
    assert faults
    assert all(found.split(": ", 1)[1].startswith(fault) for found in faults)


def test_pure_code_passes(tmp_path: Path) -> None:
    code = (
        "from dataclasses import dataclass\nfrom datetime import datetime, timedelta\n"
        "from muster.words.status import Phase\nfrom . import budgets\nfrom .observed import ObservedJob\n"
    )
    plant(tmp_path, {f"{CORE}/decide.py": code})
    assert impurities(tmp_path) == []
