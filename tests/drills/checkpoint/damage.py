"""Damage to files at rest: flip a bit, cut, empty or remove, of any file that a commit consists of."""

import random
from pathlib import Path

KINDS = ("flip", "flip", "flip", "truncate", "truncate", "empty", "remove")


def damage(files: list[Path], dice: random.Random) -> tuple[str, Path]:
    """Damage one of the files; return how, and which."""
    path, kind = dice.choice(files), dice.choice(KINDS)
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
    elif kind == "truncate":
        path.write_bytes(data[: dice.randrange(len(data))])
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    return kind, path
