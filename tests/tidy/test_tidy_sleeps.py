"""No test sleeps for luck: a sleep belongs into a loop that asks again and knows its deadline (tests/polling.py)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tidy.repository import ROOT, expect_none, parse, plant, python_files

# For the rare sleep that is the thing under test, such as a stand-in for a hung worker. The reason follows the colon.
EXCUSE = "# not a wait:"


def lucky_sleeps(root: Path) -> list[str]:
    faults = []
    for path in python_files(root, "tests"):
        lines = path.read_text().splitlines()
        for call, ancestors in calls(parse(path)):
            if is_sleep(call) and not is_polling(ancestors) and not is_excused(lines[call.lineno - 1]):
                faults.append(
                    f"{path.relative_to(root)}:{call.lineno}: sleeps for luck; wait with tests.polling.eventually"
                )
    return faults


def calls(node: ast.AST, ancestors: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.Call, tuple[ast.AST, ...]]]:
    if isinstance(node, ast.Call):
        yield node, ancestors
    for child in ast.iter_child_nodes(node):
        yield from calls(child, (*ancestors, node))


def is_sleep(call: ast.Call) -> bool:
    """time.sleep(x), asyncio.sleep(x) or a bare sleep(x); sleep(0) only lets others run."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    yields_only = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    return name == "sleep" and not yields_only


def is_polling(ancestors: tuple[ast.AST, ...]) -> bool:
    """Inside a loop, in a function that looks at a monotonic clock."""
    functions = [node for node in ancestors if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions:
        return False
    inside = ancestors[ancestors.index(functions[-1]) :]
    in_loop = any(isinstance(node, ast.While | ast.For) for node in inside)
    names = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(functions[-1]))
    return in_loop and any(name in ("monotonic", "perf_counter") for name in names)


def is_excused(line: str) -> bool:
    return len(line.partition(EXCUSE)[2].split()) >= 3


def test_no_test_sleeps_for_luck() -> None:
    expect_none(lucky_sleeps(ROOT))


@pytest.mark.parametrize(
    "body",
    [
        "    time.sleep(2)\n    assert ready()",
        "    await asyncio.sleep(0.5)",
        "    for _ in range(10):\n        time.sleep(1)",
        "    while not ready():\n        sleep(0.1)",
        "    time.sleep(2)  # not a wait:",
    ],
)
def test_a_lucky_sleep_is_found(tmp_path: Path, body: str) -> None:
    plant(tmp_path, {"tests/unit/test_luck.py": f"async def test_it():\n{body}\n"})
    assert len(lucky_sleeps(tmp_path)) == 1


@pytest.mark.parametrize(
    "body",
    [
        "    while time.monotonic() < deadline:\n        time.sleep(0.1)",
        "    await asyncio.sleep(0)",
        "    run('import time; time.sleep(60)')",
        "    time.sleep(60)  # not a wait: stands in for a hung worker",
    ],
)
def test_a_polling_loop_passes(tmp_path: Path, body: str) -> None:
    plant(tmp_path, {"tests/unit/test_luck.py": f"async def test_it():\n{body}\n"})
    assert lucky_sleeps(tmp_path) == []
