"""Nothing committed names a path or a tool of the machine that it was written on, or keeps the scar of a merge."""

import re
from pathlib import Path

import pytest
from tests.tidy.repository import ROOT, committed_files, expect_none, plant

# Written in pieces, so that this file does not contain what it looks for.
PLACES = ("wo" + "rk", "fa" + "rm", "opt/" + "wheels", "opt/" + "pypi", "root/" + r"\.pyenv", "tmp/" + "team")
TOOLS = (r"\." + r"library\b", r"\bfa" + r"rm-[a-z]+", r"\bhelper " + r"sessions?\b")
REGISTRIES = (r"\bpy" + r"pi\.org\b", r"\bpythonhosted" + r"\.org\b", r"\bdownload\.py" + r"torch\.org\b")
FORBIDDEN = {
    # Not behind a letter, dot, slash, colon or star: ./x, s3://x and **/x are about other places.
    "a path of the machine it was written on": re.compile(rf"(?<![\w.:/*-])/(?:{'|'.join(PLACES)})(?![\w-])"),
    "a tool of the machine it was written on": re.compile("|".join(TOOLS), re.IGNORECASE),
    "the host of a package registry": re.compile("|".join(REGISTRIES)),
    "the scar of a merge": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
    "a private key": re.compile("-----BEGIN " + "[A-Z ]*PRIVATE KEY-----"),
}


def forbidden_words(root: Path, files: list[Path]) -> list[str]:
    faults = []
    for path in files:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a picture or an archive
        for what, pattern in FORBIDDEN.items():
            faults += [
                f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}: names {what}: {match.group()!r}"
                for match in pattern.finditer(text)
            ]
    return faults


def test_nothing_committed_names_this_machine() -> None:
    files = committed_files(ROOT)
    assert ROOT / "pyproject.toml" in files
    expect_none(forbidden_words(ROOT, files))


@pytest.mark.parametrize(
    "text",
    [
        "cd /" + "work/main && make",
        "open('/" + "work')",
        "see ~/." + "library/search",
        "pip install --find-links /opt/" + "wheels",
        "written by a helper " + "session",
        "https://py" + "pi.org/simple",
        "<<<<<<" + "< HEAD",
        "-----BEGIN RSA " + "PRIVATE KEY-----",
    ],
)
def test_a_forbidden_word_is_found(tmp_path: Path, text: str) -> None:
    plant(tmp_path, {"README.md": f"# Title\n\n{text}\n"})
    (fault,) = forbidden_words(tmp_path, [tmp_path / "README.md"])
    assert fault.startswith("README.md:3: " if text[0] == "<" else "README.md:3: names ")


def test_ordinary_words_pass(tmp_path: Path) -> None:
    text = "s3://bucket/workers/1 and ./workdir and /workspace, a library of network/workers; the farmer's hat"
    plant(tmp_path, {"README.md": text})
    assert forbidden_words(tmp_path, [tmp_path / "README.md"]) == []
