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

from muster.contract.checkpoint import Commit
from muster.trainer.checkpoint.failures import UnusableCommit


def make_deterministic(device: torch.device) -> None:
    """Bitwise repeatable arithmetic (docs.pytorch.org/docs/stable/notes/randomness.html). Call it first."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh tensors with NaN would only guard against reading what was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False


def seed(value: int, share: int) -> None:
    """Seed every generator, differently for each data-parallel share: ranks that compute one model together must draw
    the same numbers. Weights and data have seeds of their own."""
    mixed = (value * 1_000_003 + share) % 2**32
    random.seed(mixed)
    torch.manual_seed(mixed)  # CUDA's generators too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed)


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


def must_be_restorable(commit: Commit, rank: int, world: int) -> None:
    """Raises UnusableCommit where `restore` would fail. No generator in use is touched."""
    saved = of_rank(commit, rank, world)
    try:
        if "python" in saved:
            random.Random().setstate(_python_state(saved["python"]))
        if "torch" in saved:
            torch.Generator().set_state(_unpack(saved["torch"]))
        if "cuda" in saved and torch.cuda.is_available():
            torch.Generator("cuda").set_state(_unpack(saved["cuda"]))
        if "numpy" in saved:
            import numpy

            numpy.random.RandomState().set_state(_numpy_state(saved["numpy"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise UnusableCommit(
            f"the checkpoint at step {commit.step}: the state of rank {rank}'s random generators is damaged: {error!r}"
        ) from None


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
