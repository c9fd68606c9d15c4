"""The files that we lay out are safetensors by the library's own judgement."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from muster.trainer.checkpoint.failures import DamagedCommit
from muster.trainer.checkpoint.shard_file import header_bytes, lay_out, read_header
from muster.trainer.checkpoint.tensors import DTYPES
from muster.words.checkpoint import ITEM_BYTES

TORCH = {name: dtype for dtype, name in DTYPES.items()}


def test_every_dtype_is_read_by_the_library(tmp_path: Path) -> None:
    layout = lay_out(
        [(f"t/{dtype}", dtype, (3, 5)) for dtype in ITEM_BYTES] + [("scalar", "F32", ()), ("none", "F32", (0, 4))]
    )
    data = bytearray(layout.size)
    data[: len(layout.header)] = layout.header
    for name, slot in layout.slots.items():
        assert slot.start % ITEM_BYTES[slot.dtype] == 0, f"{name} is not aligned"
        data[slot.start : slot.end] = bytes(1 for _ in range(slot.end - slot.start))
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == set(layout.slots)
        for name, slot in layout.slots.items():
            tensor = file.get_tensor(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (TORCH[slot.dtype], slot.shape)
            assert bytes(
                tensor.contiguous().view(torch.uint8).reshape(-1).tolist() if tensor.numel() and tensor.dim() else b""
            ) == (bytes(data[slot.start : slot.end]) if slot.shape and tensor.numel() else b"")
    assert read_header(memoryview(data), len(data), "x") == layout.slots
    with pytest.raises(DamagedCommit, match="has 1 bytes, and by its safetensors header"):
        read_header(memoryview(data), 1, "x")


def _file(header: object, data_bytes: int = 0) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def _entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [1] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"abc", "it ends after 3 bytes"),
        (struct.pack("<Q", 1 << 60), "its header claims 1152921504606846976 bytes"),
        (struct.pack("<Q", 4) + b"nope", "its safetensors header is damaged"),
        (_file({"a": {"dtype": 1}}), "its safetensors header is damaged"),
        (_file(json.loads("[" * 150 + "]" * 150)), "its safetensors header is damaged"),
        (_file({"a": _entry(0, 4, dtype="F128")}), "gives no known dtype for a"),
        (_file({"a": _entry(0, 5)}, 5), "puts a where it can't be"),
        (_file({"a": _entry(4, 8)}, 8), "puts a where it can't be"),
        (_file({"a": _entry(0, 4), "b": _entry(2, 6)}, 6), "puts b where it can't be"),
        (_file({"a": _entry(0, 4)}, 8), "has 77 bytes, and by its safetensors header 73"),
        (_file({"a": _entry(0, 4, shape=[-1])}, 4), "its safetensors header is damaged"),
        (_file({"a": _entry(0, 4, shape=[10**30])}, 4), "its safetensors header is damaged"),
    ],
)
def test_what_is_no_safetensors_file_is_said(data: bytes, says: str) -> None:
    with pytest.raises(DamagedCommit, match=f"^here: .*{says}"):
        header_bytes(data[:8], "here") and read_header(memoryview(data), len(data), "here")
