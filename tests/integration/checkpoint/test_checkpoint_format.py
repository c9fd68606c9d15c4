"""The format is what docs/checkpoint-format.md says: old commits stay readable, strangers' commits load, and the
documentation's own reader reads ours."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save
from tests.integration.checkpoint import gang
from tests.integration.checkpoint.one_rank import trained

from muster.trainer.checkpoint import load, resume

DOCUMENT = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"
GOLDEN = Path(__file__).with_name("golden")


def reader_of_the_documentation() -> str:
    return re.search(r"## A reader\n+```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[1]  # type: ignore[index]


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.glob("v*")))
def test_a_commit_of_an_older_version_loads(version: str, tmp_path: Path) -> None:
    folder = tmp_path / "uid"
    shutil.copytree(GOLDEN / version, folder)
    model, optimizer = gang.build("none", seed=1)
    commit = resume(folder.as_uri(), 1, model, optimizer, lambda words: pytest.fail(words))
    assert gang.digest(model, optimizer) == json.loads((folder / "digests.json").read_text())
    assert (commit.step, commit.world_size, commit.cursor.sample) == (1, 2, gang.SAMPLES_PER_STEP)


def test_the_reader_in_the_documentation_is_short_and_reads_everything(tmp_path: Path) -> None:
    folder = tmp_path / "uid"
    digests = trained(folder.as_uri(), steps=2)[2]
    code = reader_of_the_documentation()
    assert len(code.strip().splitlines()) <= 40
    names: dict[str, object] = {"__name__": "reader"}
    exec(code, names)
    tensors = names["read_tensors"](folder, names["read_commit"](folder))  # type: ignore[operator]
    assert {n: hashlib.sha256(t.tobytes()).hexdigest()[:16] for n, t in tensors.items()} == digests
    script = tmp_path / "reader.py"
    script.write_text(code)
    run = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=True)
    assert "model/blocks.0.up.weight float32 (13, 16)" in run.stdout
    shard = next(folder.glob("step-00000002/*/*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    assert subprocess.run([sys.executable, script, folder], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("algorithm", ["sha256", "blake2b"])
def test_a_commit_that_another_program_wrote_by_the_specification_loads(tmp_path: Path, algorithm: str) -> None:
    """Other checksums, no parts, no `start`, unaligned data, one tensor in two files, unknown keys."""
    folder = tmp_path / "uid"
    names: dict[str, object] = {"__name__": "reader"}
    exec(reader_of_the_documentation(), names)
    source = tmp_path / "source"
    digests = trained(source.as_uri(), steps=1)[1]
    commit = names["read_commit"](source)  # type: ignore[operator]
    tensors: dict[str, numpy.ndarray] = names["read_tensors"](source, commit)  # type: ignore[operator]
    halves: list[dict[str, numpy.ndarray]] = [{"a": numpy.zeros(3, numpy.uint8)}, {}]
    index: dict[str, object] = {}
    for name, tensor in tensors.items():
        cut = len(tensor) // 2 if tensor.ndim else 0
        slices = [(0, tensor[:cut], 0), (1, tensor[cut:], cut)] if cut else [(1, tensor, 0)]
        for file, part, _ in slices:
            halves[file][name] = numpy.ascontiguousarray(part)
        index[name] = {
            "dtype": {"float32": "F32", "int64": "I64"}[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "pieces": [
                {"file": f, "name": name, "offset": [o, *[0] * (p.ndim - 1)][: p.ndim], "extent": list(p.shape)}
                for f, p, o in slices
            ],
        }
    files = []
    for number, half in enumerate(halves):
        data = save(half)
        key = f"step-00000001/attempt-1/other-{number}.safetensors"
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
        files.append({"key": key, "bytes": len(data), "checksum": hashlib.new(algorithm, data).hexdigest()})
    document = {
        "version": 1, "job": "other", "jobUid": "x", "attempt": 1, "step": 1, "committedAt": 0.5, "worldSize": 2,
        "checksumAlgorithm": algorithm, "files": files, "tensors": index, "config": {}, "architecture": {},
        "cursor": {"seed": 0, "epoch": 0, "sample": 5}, "futureKey": ["ü", 1e-7],
    }  # fmt: skip
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    (folder / "commits").mkdir()
    sealed = {**document, "seal": hashlib.sha256(canonical).hexdigest()}
    (folder / "commits" / "step-00000001.json").write_text(json.dumps(sealed, indent=2))
    model, optimizer = gang.build("none", seed=1)
    assert load(folder.as_uri(), 1, model, optimizer).cursor.sample == 5
    assert gang.digest(model, optimizer) == digests
