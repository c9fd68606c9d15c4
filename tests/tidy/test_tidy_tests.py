"""Tests that can fail: each asserts something, and a skip says why and hides nothing that the set-up installs."""

import ast
from pathlib import Path

import pytest
from tests.tidy.repository import ROOT, expect_none, parse, plant, python_files

# For the test of something that must not raise: a comment in the function that says so.
EXCUSE = "# fails by raising"
# A call that fails on a false answer, by a word in its name: `expect_none(…)`, `case.call_and_validate()`.
JUDGES = {"assert", "expect", "check", "eventually", "fail", "raises", "warns", "verify", "validate", "must"}


def idle_tests(root: Path) -> list[str]:
    """Test functions that judge nothing themselves, nor through a helper of the same file."""
    faults = []
    for path in python_files(root, "tests"):
        text, tree = path.read_text(), parse(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        judging = {function.name for function in functions if _judges(function)}
        for function in functions:
            if not function.name.startswith("test_") or function.name in judging:
                continue
            by_helper = judging & {_name(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
            if not by_helper and EXCUSE not in (ast.get_source_segment(text, function) or ""):
                faults.append(f"{path.relative_to(root)}:{function.lineno}: {function.name} can't fail")
    return faults


def _judges(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and _fails(node)) for node in ast.walk(function)
    )


def _fails(call: ast.Call) -> bool:
    checked = any(word.arg == "check" and getattr(word.value, "value", None) is True for word in call.keywords)
    return checked or not JUDGES.isdisjoint(_name(call.func).split("_"))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def silent_skips(root: Path) -> list[str]:
    """Skips and expected failures without a reason, and skips for a missing import: the set-up installs everything."""
    faults = []
    for path in python_files(root, "tests"):
        tree = parse(path)
        call_of = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_pytest(node):
                fault = _skip_fault(node.attr, call_of.get(id(node)))
                faults += [f"{path.relative_to(root)}:{node.lineno}: {fault}"] if fault else []
    return sorted(faults)


def _skip_fault(what: str, call: ast.Call | None) -> str | None:
    if what == "importorskip":
        return "importorskip hides a broken installation; import it, or add it to the extra 'dev'"
    if what not in ("skip", "skipif", "xfail"):
        return None
    by_name = call is not None and any(word.arg == "reason" for word in call.keywords)
    by_place = call is not None and what == "skip" and bool(call.args)
    return None if by_name or by_place else f"{what} gives no reason"


def _is_pytest(node: ast.Attribute) -> bool:
    """pytest.skip or pytest.mark.skip, not some iterator's skip."""
    owner = node.value
    return (isinstance(owner, ast.Name) and owner.id == "pytest") or (
        isinstance(owner, ast.Attribute) and owner.attr == "mark"
    )


def test_every_test_can_fail() -> None:
    expect_none(idle_tests(ROOT))


def test_every_skip_says_why() -> None:
    expect_none(silent_skips(ROOT))


@pytest.mark.parametrize(
    "body",
    ["    run()", "    assertion = 1\n    print(assertion)", "    subprocess.run(['x'], check=False)", "    helper()"],
)
def test_an_idle_test_is_found(tmp_path: Path, body: str) -> None:
    plant(tmp_path, {"tests/unit/test_idle.py": f"def helper():\n    pass\n\ndef test_it():\n{body}\n"})
    assert idle_tests(tmp_path) == ["tests/unit/test_idle.py:4: test_it can't fail"]


@pytest.mark.parametrize(
    "body",
    [
        "    assert run() == 1",
        "    with pytest.raises(ValueError):\n        run()",
        "    subprocess.run(['x'], check=True)",
        "    eventually(run, 'its end')",
        "    helper()",
        "    # fails by raising when the lock is still held\n    run()",
    ],
)
def test_a_judging_test_passes(tmp_path: Path, body: str) -> None:
    plant(tmp_path, {"tests/unit/test_busy.py": f"def helper():\n    assert run()\n\ndef test_it():\n{body}\n"})
    assert idle_tests(tmp_path) == []


def test_silent_skips_are_found(tmp_path: Path) -> None:
    text = (
        "import pytest\n"
        "yaml = pytest.importorskip('yaml')\n"
        "@pytest.mark.skip\n"
        "def test_a(): pytest.skip()\n"
        "@pytest.mark.skipif(True)\n"
        "def test_b(): pytest.skip('no GPU here')\n"
        "@pytest.mark.skipif(not GPU, reason='needs a CUDA device')\n"
        "def test_c(): rows.skip(3)\n"
    )
    plant(tmp_path, {"tests/unit/test_skips.py": text})
    assert [fault.removeprefix("tests/unit/test_skips.py:") for fault in silent_skips(tmp_path)] == [
        "2: importorskip hides a broken installation; import it, or add it to the extra 'dev'",
        "3: skip gives no reason",
        "4: skip gives no reason",
        "5: skipif gives no reason",
    ]
