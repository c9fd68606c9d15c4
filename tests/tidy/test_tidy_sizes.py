"""Sizes that a reader feels: long functions, classes that are two classes, and files too small to be worth opening.

Lines of classes and files are not limited. A limit that a feature's next field would pass shapes the code and not its
design (a configuration of 249 of 250 lines could take no further objective).
"""

import ast
from pathlib import Path

from tests.tidy.repository import ROOT, SOURCE_ROOTS, plant, python_files

FUNCTION_LINES_MAX = 75
ATTRIBUTES_MAX = 15  # that the methods of a class assign: more is state that nobody keeps in mind
SMALL_FILE_LINES = 40
# Files of fewer lines: each costs its reader a hop. Lower the number with each that goes back to where it is read.
SMALL_FILES_MAX = 78


def long_functions(tree: ast.AST) -> list[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    return [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > FUNCTION_LINES_MAX]


def classes_of(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def assigned(of_class: ast.ClassDef) -> set[str]:
    """Return the names that methods assign on `self`."""
    stores = (
        node for node in ast.walk(of_class) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    return {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}


def parts_of(of_class: ast.ClassDef) -> list[list[str]]:
    """Return groups of methods that share no attribute and no call with each other, each of two methods or more.

    Only classes with an `__init__` count: a document's fields are its content, not state that methods share.
    """
    methods = {node.name: node for node in of_class.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if "__init__" not in methods:
        return []
    uses = {
        name: {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        for name, method in methods.items()
        if not name.startswith("__")
    }
    parts: list[tuple[set[str], set[str]]] = []  # methods, and the attributes and methods that they use
    for name, names in uses.items():
        own, reach = {name}, names | {name}
        for other in [part for part in parts if part[1] & reach]:
            parts.remove(other)
            own, reach = own | other[0], reach | other[1]
        parts.append((own, reach))
    return [sorted(own) for own, reach in parts if len(own) > 1 and len(reach - uses.keys()) > 1]


def faults_of(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    faults = [f"{name} (at most {FUNCTION_LINES_MAX}): give its phases names" for name in long_functions(tree)]
    for each in classes_of(tree):
        if len(parts := parts_of(each)) > 1:
            faults.append(f"{each.name} is {len(parts)} classes: {'; '.join(', '.join(part) for part in parts)}")
        if len(names := assigned(each)) > ATTRIBUTES_MAX:
            faults.append(f"{each.name}: {len(names)} attributes are assigned, at most {ATTRIBUTES_MAX}")
    return faults


def small_files(root: Path) -> list[str]:
    files = [path for path in python_files(root, *SOURCE_ROOTS) if not path.name.startswith("__")]
    return [str(path.relative_to(root)) for path in files if len(path.read_text().splitlines()) < SMALL_FILE_LINES]


def test_functions_and_classes_are_of_one_piece() -> None:
    files = python_files(ROOT, *SOURCE_ROOTS)
    assert {str(path.relative_to(ROOT)): faults for path in files if (faults := faults_of(path))} == {}


def test_small_files_only_become_fewer() -> None:
    assert len(small_files(ROOT)) <= SMALL_FILES_MAX


def test_what_is_too_long_or_not_of_one_piece_is_found(tmp_path: Path) -> None:
    long = "def long():\n" + "    x = 1\n" * FUNCTION_LINES_MAX
    fields = "; ".join(f"self.a{number} = 0" for number in range(ATTRIBUTES_MAX + 1))
    two = (
        "class Two:\n    def __init__(self): ...\n"
        "    def a(self): return self.x + self.y\n    def b(self): return self.x\n"
        "    def c(self): return self.u + self.v\n    def d(self): return self.c()\n"
    )
    plant(
        tmp_path,
        {
            "services/long.py": long,
            "services/fits.py": long.removesuffix("    x = 1\n"),
            "services/full.py": f"class Full:\n    def __init__(self):\n        {fields}\n",
            "services/two.py": two,
            "services/one.py": two.replace("self.u + self.v", "self.x"),
        },
    )
    faults = {path.name: faults_of(path) for path in python_files(tmp_path, "services")}
    assert faults == {
        "fits.py": [],
        "full.py": ["Full: 16 attributes are assigned, at most 15"],
        "long.py": ["long: 76 lines (at most 75): give its phases names"],
        "one.py": [],
        "two.py": ["Two is 2 classes: a, b; c, d"],
    }
    assert small_files(tmp_path) == [f"services/{name}.py" for name in ("full", "one", "two")]
