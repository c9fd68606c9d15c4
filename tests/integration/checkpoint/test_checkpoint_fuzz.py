"""Commits that are well-formed, sealed and wrongly made: whatever is wrong, the one before is loaded, or the mutant is
loaded exactly as it says.

What a mutant says is told by a reader of a few lines that believes all of it and shares no code with ours.
"""

import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.integration.checkpoint.one_rank import saver, state
from tests.polling import WAIT_SECONDS_MAX
from torch import nn

from muster.storage.listing import CommitListing
from muster.storage.opening import open_store
from muster.trainer.checkpoint import load_weights, resume
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.failures import CheckpointError, CheckpointMismatch
from muster.trainer.checkpoint.verify import verify
from muster.trainer.convert.pieces import whole
from muster.words.address import parse_address
from muster.words.checkpoint import commit_key
from muster.words.job import Keep

PARTS = 2
TORCH = {"F32": torch.float32, "I64": torch.int64}
CPU_SECONDS_MAX = 5.0  # of this process for one case; one takes a hundredth of it
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 4, 7, 8, 10**10, 10**18, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**40, 0.5, -1.0,
    1e300, "", "x", "\x00", "\ud800", "../../x", "model/bias", "model/weight", "I64", "F64", "sha256", "0" * 8, [], {},
    [0], [1], [0, 0], [2, 2], [[]], {"a": 1}, json.loads("[" * 90 + "]" * 90),
]  # fmt: skip


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model.register_buffer("seen", torch.arange(3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer/{name}/{kind}": value for kind, value in optimizer.state.get(parameter, {}).items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def sealed(document: dict[str, Any]) -> bytes:
    """Sealed again after it was changed, as only its writer can."""
    bare = {key: value for key, value in document.items() if key != "seal"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    bare["seal"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()


class House:
    """Commits of steps 1 and 2 in a folder in memory."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "uid"
        model, optimizer = build()
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        with saver(self.folder.as_uri(), Keep(last=5)) as saving:
            for step in (1, 2):
                model(torch.ones(3, 4) * step).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                self.states[step] = tensors(model, optimizer)
                saving.save(state(model, optimizer, step), emergency=True)
                assert [o.committed for o in saving.drain(WAIT_SECONDS_MAX)] == [True]
        self.sound = (self.folder / commit_key(2)).read_bytes()
        self.document: dict[str, Any] = json.loads(self.sound)

    def put(self, data: bytes) -> None:
        shutil.rmtree(self.folder / "quarantine", ignore_errors=True)
        (self.folder / commit_key(2)).write_bytes(data)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        yield House(Path(root))


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found: list[tuple[Any, Any]] = []
    level = [document]
    while level:
        here = level.pop()
        keys: Any = here.keys() if isinstance(here, dict) else range(len(here))
        for key in keys:
            found.append((here, key))
            if isinstance(here[key], dict | list):
                level.append(here[key])
    return found


def mutate(document: dict[str, Any], how: str, where: int, value: int) -> None:
    all_places = places(document)
    here, key = all_places[where % len(all_places)]
    other, other_key = all_places[value % len(all_places)]
    if how == "set":
        here[key] = json.loads(json.dumps(VALUES[value % len(VALUES)]))
    elif how == "drop":
        del here[key]
    elif how == "copy":
        here[key] = json.loads(json.dumps(other[other_key]))
    elif how == "repeat" and isinstance(here, list):
        here.insert(key, json.loads(json.dumps(here[key])))
    elif how == "add" and isinstance(here[key], int):
        here[key] += value % 9 - 4
    elif how == "swap":
        mine, theirs = json.dumps(here[key]), json.dumps(other[other_key])
        here[key], other[other_key] = json.loads(theirs), json.loads(mine)


HOW = ["set", "drop", "copy", "repeat", "add", "swap"]
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "drop", "copy", "repeat", "add", "swap"]),
        st.integers(0, 1 << 20),
        st.integers(0, 1 << 20),
    ),
    min_size=1,
    max_size=3,
)


def as_it_says(folder: Path, document: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a COMMIT, by the specification, believing all that it says."""
    files = []
    for entry in document["files"]:
        data = (folder / entry["key"]).read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        files.append((data, json.loads(data[8 : 8 + length]), 8 + length))
    found = {}
    for name, about in document["tensors"].items():
        tensor = torch.zeros(about["shape"], dtype=TORCH[about["dtype"]])
        filled = torch.zeros(about["shape"], dtype=torch.int32)
        for piece in about["pieces"]:
            data, header, base = files[piece["file"]]
            slot = header[piece["name"]]
            begin, end = slot["data_offsets"]
            assert slot["shape"] == piece["extent"]
            assert slot["dtype"] == about["dtype"]
            assert piece.get("start") in (None, base + begin)
            part = torch.frombuffer(bytearray(data[base + begin : base + end]), dtype=tensor.dtype).view(
                piece["extent"]
            )
            box = tuple(slice(o, o + e) for o, e in zip(piece["offset"], piece["extent"], strict=True))
            assert math.prod(piece["extent"]) == tensor[box].numel()
            tensor[box] = part.view(piece["extent"])
            filled[box] += 1
        assert bool((filled == 1).all()), f"{name} is not covered once"
        found[name] = tensor
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def weights_of(house: House) -> dict[str, torch.Tensor] | None:
    """The weights of step 2 for a job that starts from them; None where they are refused."""
    live = {f"model/{name}": torch.full_like(tensor, 7) for name, tensor in build()[0].state_dict().items()}
    try:
        load_weights(house.folder.as_uri(), 2, live)
    except (CheckpointError, CheckpointMismatch):
        return None
    return live


def survives(house: House, data: bytes, document: dict[str, Any], starts: bool = True, tries: int = 3) -> str:
    """One case for every reader of commits; how `resume` judged it. starts: whether a job also starts from its weights.

    A case that takes too long is tried again: a collection of this process' garbage costs some case a second now and
    then, and what hangs because of its document hangs each time.
    """
    began = time.process_time()
    house.put(data)
    store = open_store(house.folder.as_uri())
    try:
        commit = commit_in(store, 2)
        verify(store, commit)
        weights = {name: bytes(found) for name, found in whole(store, commit, commit.tensors).items()}
    except CheckpointError:
        weights = None  # refused, as for an export
    started = weights_of(house) if starts else None
    if started is not None:
        asked = {name: entry for name, entry in document["tensors"].items() if name.startswith("model/")}
        assert same(started, as_it_says(house.folder, document | {"tensors": asked}))
    listed = [seen.step for seen in CommitListing().read(parse_address(house.folder.as_uri()))]
    model, optimizer = build()
    said: list[str] = []
    loaded = resume(house.folder.as_uri(), 2, model, optimizer, said.append)
    found = tensors(model, optimizer)
    spent = time.process_time() - began
    if spent >= CPU_SECONDS_MAX:
        assert tries > 1, f"{spent:.2f} s of CPU"
        return survives(house, data, document, starts, tries - 1)
    if loaded.step == 1:
        assert same(found, house.states[1])
        assert said, "nobody was told"
        return "refused"
    assert (loaded.step, listed, said) == (2, [1, 2], [])
    assert weights is not None
    assert starts == (started is not None)
    expected = as_it_says(house.folder, document)
    assert same(found, expected)
    for name, tensor in expected.items():
        assert weights[name] == tensor.numpy().tobytes()
    return "loaded"


def check(house: House, mutations: list[tuple[str, int, int]], starts: bool = True) -> None:
    document = json.loads(house.sound)
    for mutation in mutations:
        mutate(document, *mutation)
        if not document:
            return
    survives(house, sealed(document), json.loads(json.dumps(document)), starts)


def test_the_house_is_sound(house: House) -> None:
    assert survives(house, house.sound, house.document) == "loaded"
    assert survives(house, sealed(house.document), house.document) == "loaded"
    assert same(as_it_says(house.folder, house.document), house.states[2])


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


QUICK: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
}


@settings(max_examples=300, **QUICK)
@given(mutations=MUTATIONS)
def test_mutants_are_refused_or_loaded_as_they_say(house: House, mutations: list[tuple[str, int, int]]) -> None:
    check(house, mutations)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=6_000 // PARTS, **QUICK)
@given(mutations=MUTATIONS)
def test_6_000_mutants_are_refused_or_loaded_as_they_say(
    house: House, part: int, mutations: list[tuple[str, int, int]]
) -> None:
    """In parts, because no test may take ten minutes; each part has other mutants, also where the dice are fixed.

    Starts from weights, which share all but the last step with `resume`, are tried in one part: they cost 2 ms a case.
    """
    mutants = [(how, where + part * 104_729, value + part * 611_953) for how, where, value in mutations]
    check(house, mutants, starts=part == 0)
