"""Shell commands in the documentation, as a reader would copy them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:make|muster) [^`\n]+)`(?!`)")
SHELLS = ("sh", "bash", "shell")
# Environment in front of a command, and wrappers that run the next word.
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
WRAPPERS = ("sudo", "time", "exec", "nohup", "env")


@dataclass(frozen=True)
class Command:
    """One command with its words, found at `place` (file:line)."""

    place: str
    words: tuple[str, ...]


def documents(root: Path) -> list[Path]:
    return sorted(
        path for path in [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("*/README.md")] if path.exists()
    )


def commands(root: Path) -> Iterator[Command]:
    """Commands in shell blocks, after `$ ` in transcripts, and `make …` or `muster …` between single backquotes."""
    for path in documents(root):
        text = path.read_text()
        for line, shell in sorted([*_in_blocks(text), *_in_sentences(text)]):
            for words in simple_commands(shell):
                yield Command(f"{path.relative_to(root)}:{line}", words)


def _in_blocks(text: str) -> Iterator[tuple[int, str]]:
    for block in FENCE.finditer(text):
        number = text.count("\n", 0, block.start("body")) + 1
        for line in re.split(r"(?<!\\)\n", block["body"]):  # a backslash carries a command on to the next line
            stripped = line.replace("\\\n", " ").strip()
            is_typed = stripped.startswith("$ ") and block["language"] in ("console", "text", "")
            if block["language"] in SHELLS or is_typed:
                yield number, stripped.removeprefix("$ ")
            number += line.count("\n") + 1


def _in_sentences(text: str) -> Iterator[tuple[int, str]]:
    outside = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block.group()), text)
    for match in INLINE.finditer(outside):
        yield outside.count("\n", 0, match.start()) + 1, match[1]


def simple_commands(shell: str) -> Iterator[tuple[str, ...]]:
    """Split `a && b | c` into its commands, each without assignments, redirections and wrappers."""
    lexer = shlex.shlex(shell, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        tokens = [*lexer, ";"]
    except ValueError:
        return  # an unclosed quote: the middle of a here-document
    skip_next = False
    for token in tokens:
        if skip_next:
            skip_next = False
        elif token in ("<", ">", ">>", "2>", "&>"):
            skip_next = True
        elif set(token) <= set("();|&"):
            if words:
                yield tuple(words)
            words = []
        elif words or not (ASSIGNMENT.match(token) or token in WRAPPERS):
            words.append(token)
