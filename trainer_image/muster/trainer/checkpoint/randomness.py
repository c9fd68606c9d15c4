"""Seeds of the random generators, and their state as JSON.

Training keeps no such state: each pass seeds the generators by what it computes (train/step.py), so that a resumed run
draws the same numbers on any number of ranks. A program's own loop draws as it likes, and its state goes into its
checkpoints, of use on the same number of ranks.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import random
import struct
import sys
from typing import Any

import torch

from muster.words.checkpoint import Commit


def make_deterministic(device: torch.device) -> None:
    """Bitwise repeatable arithmetic (docs.pytorch.org/docs/stable/notes/randomness.html). Call it first."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh tensors with NaN would only guard against reading what was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False


def seed(*key: int) -> None:
    """Seed every generator by a key of numbers; other keys give other numbers. Weights and data have seeds of their
    own."""
    mixed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    random.seed(mixed)
    # torch.manual_seed looks for devices of every kind, which takes a hundred times as long as the generator's own.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)


def state() -> dict[str, Any]:
    """This rank's generators as JSON."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "words": _pack_words(words), "gauss": gauss},
        "torch": _pack(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = _pack(torch.cuda.get_rng_state())
    if "numpy" in sys.modules:
        kind, words, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        states["numpy"] = {
            "kind": kind,
            "words": base64.b64encode(words.astype("<u4").tobytes()).decode(),
            "position": int(position),
            "hasGauss": int(has_gauss),
            "gauss": float(cached),
        }
    return states


def restore(saved: dict[str, Any]) -> None:
    """Put back what `state` returned. Generators that are not here any more (no CUDA) are left out."""
    if "python" in saved:
        random.setstate(_python_state(saved["python"]))
    if "torch" in saved:
        torch.set_rng_state(_unpack(saved["torch"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unpack(saved["cuda"]))
    if "numpy" in saved:
        import numpy

        numpy.random.set_state(_numpy_state(saved["numpy"]))


def of_rank(commit: Commit, rank: int, world: int) -> dict[str, Any]:
    """A rank's generators at a commit; none where it was made by another number of ranks."""
    return commit.rng[rank] if len(commit.rng) == world else {}


def _python_state(saved: dict[str, Any]) -> tuple[int, tuple[int, ...], float | None]:
    if saved["version"] != 3:  # since Python 3.2
        raise ValueError(f"Python's generator is of version {saved['version']!r}")
    return saved["version"], _unpack_words(saved["words"]), saved["gauss"]


def _numpy_state(saved: dict[str, Any]) -> tuple[str, Any, int, int, float]:
    import numpy

    words = numpy.frombuffer(base64.b64decode(saved["words"]), dtype="<u4")
    if not 0 <= saved["position"] <= len(words):
        raise ValueError(f"numpy's generator is at position {saved['position']!r}")
    return saved["kind"], words, saved["position"], saved["hasGauss"], saved["gauss"]


def _pack(tensor: torch.Tensor) -> str:
    return base64.b64encode(ctypes.string_at(tensor.data_ptr(), tensor.numel())).decode()  # of bytes; quick


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _pack_words(words: tuple[int, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(words)}I", *words)).decode()


def _unpack_words(text: str) -> tuple[int, ...]:
    data = base64.b64decode(text)
    return tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4))
