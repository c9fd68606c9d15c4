"""Damage to files at rest: flip a bit, cut, empty or remove, of any file that a commit consists of."""

import random
from pathlib import Path

KINDS = ("flip", "flip", "flip", "truncate", "truncate", "empty", "remove")


def damaged(data: bytes, dice: random.Random) -> tuple[str, bytes | None]:
    """How, and what is left; None: nothing, not even the name."""
    kind = dice.choice(KINDS)
    if kind == "flip":
        changed = bytearray(data)
        changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return kind, bytes(changed)
    if kind == "truncate":
        return kind, data[: dice.randrange(len(data))]
    return kind, b"" if kind == "empty" else None


def damage(files: list[Path], dice: random.Random) -> tuple[str, Path]:
    """Damage one of the files; return how, and which."""
    path = dice.choice(files)
    kind, left = damaged(path.read_bytes(), dice)
    if left is None:
        path.unlink()
    else:
        path.write_bytes(left)
    return kind, path
