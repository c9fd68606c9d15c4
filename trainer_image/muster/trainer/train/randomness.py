"""Seeds, and the state of every random generator of a rank as JSON."""

from __future__ import annotations

import base64
import ctypes
import os
import random
import struct
import sys
from typing import Any

import torch


def make_deterministic(device: torch.device) -> None:
    """Bitwise repeatable arithmetic (docs.pytorch.org/docs/stable/notes/randomness.html). Call it first."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh tensors with NaN would only guard against reading what was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False


def seed(value: int, rank: int) -> None:
    """Seed every generator, differently on each rank. Weights and data have seeds of their own."""
    mixed = (value * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    torch.manual_seed(mixed)  # CUDA's generators too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed)


def state() -> dict[str, Any]:
    """This rank's generators as JSON."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "words": _pack_words(words), "gauss": gauss},
        "torch": _pack(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = _pack(torch.cuda.get_rng_state())
    if "numpy" in sys.modules:
        kind, words, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        found["numpy"] = {
            "kind": kind,
            "words": base64.b64encode(words.astype("<u4").tobytes()).decode(),
            "position": int(position),
            "hasGauss": int(has_gauss),
            "gauss": float(cached),
        }
    return found


def restore(saved: dict[str, Any]) -> None:
    """Put back what `state` returned. Generators that are not here any more (no CUDA) are left out."""
    if "python" in saved:
        held = saved["python"]
        random.setstate((held["version"], _unpack_words(held["words"]), held["gauss"]))
    if "torch" in saved:
        torch.set_rng_state(_unpack(saved["torch"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unpack(saved["cuda"]))
    if "numpy" in saved:
        import numpy

        held = saved["numpy"]
        words = numpy.frombuffer(base64.b64decode(held["words"]), dtype="<u4")
        numpy.random.set_state((held["kind"], words, held["position"], held["hasGauss"], held["gauss"]))


def _pack(tensor: torch.Tensor) -> str:
    return base64.b64encode(ctypes.string_at(tensor.data_ptr(), tensor.numel())).decode()  # of bytes; quick


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _pack_words(words: tuple[int, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(words)}I", *words)).decode()


def _unpack_words(text: str) -> tuple[int, ...]:
    data = base64.b64decode(text)
    return tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4))
