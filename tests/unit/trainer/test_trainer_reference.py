"""What the reference says of the answers is read back as it was stored, or training says why it can't go on."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as safetensors
from tests.unit.data.making import opened, write_jsonl

from muster.recipe.training import TrainingConfig
from muster.trainer.data import RunData
from muster.trainer.data.pairs import PairPacking
from muster.trainer.errors import StorageError, UserError
from muster.trainer.train.reference import read_reference
from muster.words.base import parse


def pairs(folder: Path, holdout: float = 0.25) -> RunData:
    records = [{"prompt": f"{n}", "chosen": "y" * (1 + n % 3), "rejected": "n"} for n in range(16)]
    document: dict[str, Any] = {
        "task": "dpo",
        "model": {"from": {"uri": "file:///base"}},
        "data": {"train": [{"source": str(write_jsonl(folder / "a.jsonl", records)), "format": "preference"}]},
        "batch": {"tokensPerStep": 512},
        "length": {"steps": 1},
        "evaluation": {"every": 1, "holdout": holdout},
    }
    document["data"]["sequenceLength"] = 16
    return opened(parse(TrainingConfig, document), folder / "cache")


def stored(data: RunData, folder: Path) -> str:
    """The address of numbers that tell of which pair they are: its place among the packing's members."""
    assert data.evaluation is not None
    parts = [part for part in (*data.train.parts, *data.evaluation.parts) if isinstance(part, PairPacking)]
    numbers = {p.fingerprint(): np.arange(2 * len(p.members), dtype=np.float32).reshape(-1, 2) for p in parts}
    content = safetensors.save(numbers)
    digest = hashlib.sha256(content).hexdigest()
    (folder / "reference").mkdir()
    (folder / "reference" / f"{digest}.safetensors").write_bytes(content)
    return digest


def test_every_pair_gets_its_own(tmp_path: Path) -> None:
    data = pairs(tmp_path)
    read_reference(stored(data, tmp_path), data, f"file://{tmp_path}")
    for dataset in (data.train, data.evaluation):
        assert dataset is not None
        seen = []
        for index in range(dataset.samples_per_epoch):
            sample = dataset.sample(3, index)
            assert sample.reference is not None
            assert len(sample.reference) == sample.documents.max() + 1
            seen += sample.reference.tolist()
        assert sorted(seen) == [float(n) for n in range(len(seen))]


def test_what_is_not_as_it_was_is_refused(tmp_path: Path) -> None:
    data, folder = pairs(tmp_path), f"file://{tmp_path}"
    digest = stored(data, tmp_path)
    with pytest.raises(UserError, match="the evaluation's data, or how it is divided, has changed since the job began"):
        read_reference(digest, pairs(tmp_path, holdout=0.5), folder)
    path = tmp_path / "reference" / f"{digest}.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StorageError, match="is damaged: its SHA-256 is not its name"):
        read_reference(digest, data, folder)
    path.unlink()
    with pytest.raises(StorageError, match=r"is gone: .* put it back, or submit a new job with model.from"):
        read_reference(digest, data, folder)
