"""Every command in the documentation exists: make targets, `muster` sub-commands with their options, scripts, links."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.tidy.documents import commands, documents
from tests.tidy.repository import ROOT, committed_files, expect_none, plant
from typer.testing import CliRunner

from muster.cli.main import app

LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")
# `muster/__init__.py` is only ever named to say that there is none.
MODULE = re.compile(r"`(?!muster/__init__)((?:[\w.-]+/)*[\w-]+\.py)`")
# Placeholders in a synopsis: `muster get JOB`, `make <target>`, `muster …`.
PLACEHOLDER = re.compile(r"[<\[…]|\.\.\.")

Help = Callable[[tuple[str, ...]], str | None]


@cache
def muster_help(path: tuple[str, ...]) -> str | None:
    """What `muster <path> --help` prints, or None when there is no such command."""
    result = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}).invoke(app, [*path, "--help"])
    return result.output if result.exit_code == 0 else None


def false_commands(root: Path, help_of: Help) -> list[str]:
    targets = make_targets(root)
    faults = []
    for command in commands(root):
        program, *arguments = command.words
        program = Path(program).name if program.endswith(("/muster", "/python", "/make")) else program
        if program == "make":
            faults += [
                f"{command.place}: no make target '{name}'" for name in _targets_in(arguments) if name not in targets
            ]
        elif program == "muster":
            fault = _muster_fault(arguments, help_of)
            faults += [f"{command.place}: {fault}"] if fault else []
        elif program in ("python", "python3") and arguments and arguments[0].endswith(".py"):
            faults += [] if (root / arguments[0]).is_file() else [f"{command.place}: no script {arguments[0]}"]
        elif program.startswith((".ci/", "./")) and not (root / program).exists():
            faults.append(f"{command.place}: no file {program}")
    return faults


def make_targets(root: Path) -> set[str]:
    makefile = root / "Makefile"
    text = makefile.read_text() if makefile.exists() else ""
    return set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", text, re.MULTILINE))


def _targets_in(arguments: list[str]) -> list[str]:
    """The targets among make's arguments: not options, not VARIABLE=value, not placeholders."""
    return [word for word in arguments if not word.startswith("-") and "=" not in word and not PLACEHOLDER.search(word)]


def _muster_fault(arguments: list[str], help_of: Help) -> str | None:
    # Options of `muster` itself may stand before the sub-command.
    while arguments[:1] in (["--context"], ["--namespace"]):
        arguments = arguments[2:]
    words = [word for word in arguments if not PLACEHOLDER.search(word)]
    names = [word for word in words if not word.startswith("-")]
    groups = ("checkpoints", "data", "tokens", "projects", "people", "sweep", "webhooks")
    grouped = names[1:] and names[0] in groups and names[1].isalpha() and names[1].islower()
    path = tuple(names[: 2 if grouped else 1])
    text = help_of(path)
    if text is None:
        return f"no command 'muster {' '.join(path)}'"
    known = f"{text}\n{help_of(()) or ''}"
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    unknown = [option for option in options if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", known)]
    return f"'muster {' '.join(path)}' has no option {', '.join(unknown)}" if unknown else None


def dead_links(root: Path) -> list[str]:
    """Relative links in the documentation that lead nowhere."""
    return [
        f"{path.relative_to(root)}: link to {target} leads nowhere"
        for path in documents(root)
        for target in LINK.findall(path.read_text())
        if not (path.parent / target).exists()
    ]


def missing_modules(root: Path, files: list[Path]) -> list[str]:
    """Python files that the documentation names between backquotes and nobody has, by any end of their paths."""
    known = [f"/{path.relative_to(root)}" for path in files]
    return [
        f"{path.relative_to(root)}: there is no file {name}"
        for path in documents(root)
        for name in MODULE.findall(path.read_text())
        if not any(file.endswith(f"/{name}") for file in known)
    ]


def test_every_command_in_the_documentation_exists() -> None:
    expect_none(false_commands(ROOT, muster_help))


def test_every_link_leads_somewhere() -> None:
    expect_none(dead_links(ROOT))


def test_every_module_in_the_documentation_exists() -> None:
    expect_none(missing_modules(ROOT, committed_files(ROOT)))


def test_every_make_target_is_explained_and_phony() -> None:
    """`make help` lists what a person may call; a target that is no file must not be mistaken for one."""
    makefile = (ROOT / "Makefile").read_text()
    phony = set(" ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)).split())
    assert make_targets(ROOT) == phony
    explained = set(re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE))
    assert phony - explained == {"venv-run"}


DOCUMENT = """# Planted

```sh
make test TESTS=tests/unit && make fly    # a comment
MUSTER_URL=http://localhost muster submit job.yaml --watch
.venv/bin/muster submit \\
    job.yaml --fast
python3 tools/gone.py
cat <<'END
```

```console
$ muster ls --json | head -3
make nothing: this is output
$ muster sing
```

```yaml
make: never
```

Say `make swim` or `muster get JOB`, and see [there](gone.md) and [here](README.md#planted).
"""


def planted_help(path: tuple[str, ...]) -> str | None:
    pages = {(): "--json", ("submit",): "--watch", ("ls",): "", ("get",): ""}
    return pages.get(path)


def test_false_commands_are_found(tmp_path: Path) -> None:
    plant(tmp_path, {"README.md": DOCUMENT, "Makefile": "test: venv ## tests\nX := 1\n"})
    assert false_commands(tmp_path, planted_help) == [
        "README.md:4: no make target 'fly'",
        "README.md:6: 'muster submit' has no option --fast",
        "README.md:8: no script tools/gone.py",
        "README.md:15: no command 'muster sing'",
        "README.md:22: no make target 'swim'",
    ]


def test_dead_links_are_found(tmp_path: Path) -> None:
    plant(tmp_path, {"README.md": DOCUMENT})
    assert dead_links(tmp_path) == ["README.md: link to gone.md leads nowhere"]


def test_missing_modules_are_found(tmp_path: Path) -> None:
    text = "See `core/decide.py`, `decide.py`, `gone.py`, `core/gone.py`; never `muster/__init__.py`.\n"
    plant(tmp_path, {"README.md": text, "operator/core/decide.py": ""})
    assert missing_modules(tmp_path, [tmp_path / "operator/core/decide.py"]) == [
        "README.md: there is no file gone.py",
        "README.md: there is no file core/gone.py",
    ]


def test_the_real_command_line_refuses_what_it_lacks() -> None:
    """Otherwise the check above would believe anything."""
    assert muster_help(("no-such-command",)) is None


def untidy_decisions(root: Path) -> list[str]:
    """Records of one number, without the number in the title, or without a date in their first lines."""
    faults, numbers = [], set[str]()
    for path in sorted(root.glob("docs/decisions/*.md")):
        number, text = path.name[:4], path.read_text()
        if number in numbers:
            faults.append(f"{path.name}: another decision has the number {number}")
        numbers.add(number)
        if not text.startswith(f"# {number}: "):
            faults.append(f"{path.name}: its title does not begin with {number}")
        if not re.search(r"\b20\d\d-\d\d-\d\d\b", "\n".join(text.splitlines()[:8])):
            faults.append(f"{path.name}: has no date")
    return faults


def test_decisions_have_a_number_and_a_date() -> None:
    expect_none(untidy_decisions(ROOT))


def test_untidy_decisions_are_found(tmp_path: Path) -> None:
    plant(tmp_path, {"docs/decisions/0001-a.md": "# 0001: A\n\n2026-11-20\n", "docs/decisions/0001-b.md": "# B\n"})
    assert untidy_decisions(tmp_path) == [
        "0001-b.md: another decision has the number 0001",
        "0001-b.md: its title does not begin with 0001",
        "0001-b.md: has no date",
    ]
