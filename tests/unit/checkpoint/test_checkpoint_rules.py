"""A COMMIT that does not hold together is refused with its reason, whatever it is; one that does is read."""

import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from muster.storage.commits import COMMIT_BYTES_MAX, InvalidCommit, NewerCommit, parse_commit
from muster.words.checkpoint import Commit, shard_key

Document = dict[str, Any]
STEP, FOLDER = 7, "uid"


def document(tensors: int = 1, files: int = 2, rows: int = 2, start: bool = True) -> Document:
    """A whole COMMIT: weights of [files × rows, 3], cut along rows, and Adam's state of each."""
    index: Document = {}
    for tensor in range(tensors):
        state = f"optimizer/{tensor}"
        for number, name in enumerate((f"model/{tensor}", f"{state}/exp_avg", f"{state}/exp_avg_sq")):
            begin = 1000 + (3 * tensor + number) * rows * 12 if start else None
            pieces = [
                {"file": f, "name": name, "offset": [f * rows, 0], "extent": [rows, 3], "start": begin}
                for f in range(files)
            ]
            index[name] = {"dtype": "F32", "shape": [files * rows, 3], "pieces": pieces}
        scalar = {"file": 0, "name": f"{state}/step", "offset": [], "extent": [], "start": 500 + 4 * tensor}
        index[f"{state}/step"] = {"dtype": "F32", "shape": [], "pieces": [scalar]}
    size = 1000 + 3 * tensors * rows * 12 + 4 * tensors
    return {
        "version": 1, "job": "j", "jobUid": "u", "folder": FOLDER, "attempt": 1, "step": STEP, "committedAt": 1e9,
        "worldSize": files, "mesh": {}, "checksumAlgorithm": "crc32",
        "files": [
            {
                "key": shard_key(STEP, 1, f, files), "bytes": size, "checksum": "0" * 8,
                "partBytes": 1 << 24, "parts": ["0" * 8],
            }
            for f in range(files)
        ],
        "tensors": index, "cursor": {"seed": 0, "epoch": 0, "sample": 5}, "tokens": 1, "state": {}, "rng": [],
        "config": {}, "architecture": {}, "metrics": {"loss": 2.5}, "best": False,
    }  # fmt: skip


def sealed(made: Document, **layout: Any) -> bytes:
    """Sealed again after it was changed, as only its writer can."""
    text = json.dumps(made, sort_keys=True, separators=(",", ":"))
    whole = {**made, "seal": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(whole, sort_keys=True, **(layout or {"separators": (",", ":")})).encode()


def read(made: Document, **layout: Any) -> Commit:
    return parse_commit(sealed(made, **layout), step=STEP, folder=FOLDER)


def at(made: Document, path: str, value: Any) -> None:
    *above, last = [int(key) if key.isdigit() else key.replace("|", "/") for key in path.split(".")]
    here: Any = made
    for key in above:
        here = here[key]
    here[last] = value


def test_what_holds_together_is_read_in_any_layout() -> None:
    for made in (document(), document(3, 5), document(start=False), {**document(), "folder": None, "later": [1]}):
        assert read(made) == read(made, indent=1)


CHANGES: dict[str, tuple[str, Any]] = {
    "it is of step 8, but its name says step 7": ("step", 8),
    "it was made in the folder 'other'": ("folder", "other"),
    "step: must be at least 0, not -7": ("step", -7),
    "attempt: ": ("attempt", -1),
    "worldSize: ": ("worldSize", 0),
    "committedAt: ": ("committedAt", -1.0),
    "cursor.sample: ": ("cursor.sample", -5),
    "cursor.epoch: ": ("cursor.epoch", 1 << 70),
    "tokens: ": ("tokens", True),
    "it is no COMMIT": ("version", -1),
    "checksumAlgorithm: ": ("checksumAlgorithm", "md5"),
    "metrics.loss: ": ("metrics.loss", "much"),
    "files[0].bytes: ": ("files.0.bytes", 10**18),
    "files[0].partBytes: ": ("files.0.partBytes", 0),
    "are not those of its parts": ("files.0.partBytes", 1),
    "has 1000000000000000 bytes for slices of": (
        "files.0",
        {"key": "step-00000007/x", "bytes": 10**15, "checksum": "0" * 8},
    ),
    "files[0].key: ": ("files.0.key", "step-00000007/\x00"),
    "'step-00000007/../x' is no place": ("files.0.key", "step-00000007/../x"),
    "'/etc/passwd' is no place": ("files.0.key", "/etc/passwd"),
    "'commits/step-00000001.json' is no place": ("files.0.key", "commits/step-00000001.json"),
    "a crc32 checksum has 8 hex digits": ("files.0.checksum", "zz"),
    "dtype 'F128' is not known": ("tensors.model|0.dtype", "F128"),
    "no tensor is as large": ("tensors.model|0.shape", [1 << 40, 1 << 40]),
    "tensors.model/0.shape[0]: ": ("tensors.model|0.shape", [-4, 3]),
    "has not the 3 dimensions": ("tensors.model|0.shape", [4, 3, 1]),
    "its slices hold 12 of its 15 elements": ("tensors.model|0.shape", [5, 3]),
    "lies in file 2 of 2": ("tensors.model|0.pieces.0.file", 2),
    "pieces[0].file: ": ("tensors.model|0.pieces.0.file", 1 << 64),
    "has not the 2 dimensions": ("tensors.model|0.pieces.0.offset", [0]),
    "a slice of 2 at 3 is not inside its 4": ("tensors.model|0.pieces.0.offset", [3, 0]),
    "a slice of 0 at 0 is not inside its 4": ("tensors.model|0.pieces.0.extent", [0, 3]),
    "its slices overlap": ("tensors.model|0.pieces.0.offset", [1, 0]),
    "lies beyond the end of": ("tensors.model|0.pieces.0.start", 1 << 40),
    "two slices share bytes": ("tensors.model|0.pieces.0.start", 1020),
    "is used twice": ("tensors.model|0.pieces.0.name", "optimizer/0/exp_avg"),
    "pieces[0].name: ": ("tensors.model|0.pieces.0.name", "a\x00b"),
    "is not of the shape of model/0": ("tensors.optimizer|0|step", {"dtype": "F32", "shape": [0], "pieces": []}),
    "rng: of 1 ranks, and world size 2": ("rng", [{}]),
    "state.scaler: is required": ("config", {"optimizer": {}}),
    "not finite": ("state", {"best": float("inf")}),
    "nested too deeply": ("state", {"a": json.loads("[" * 70 + "]" * 70)}),
}  # fmt: skip


@pytest.mark.parametrize("says", CHANGES)
def test_what_does_not_hold_together_is_refused_with_the_place(says: str) -> None:
    made = document()
    at(made, *CHANGES[says])
    with pytest.raises(InvalidCommit) as refused:
        read(made)
    assert says in str(refused.value)
    assert not isinstance(refused.value, NewerCommit)


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        (["optimizer/0/exp_avg"], "optimizer/0/exp_avg is missing, which other weights have"),
        (["model/0"], "there is no model/0"),
    ],
)
def test_an_optimizer_without_all_of_its_state_is_refused(gone: list[str], says: str) -> None:
    made = document(tensors=2)
    for name in gone:
        del made["tensors"][name]
    with pytest.raises(InvalidCommit, match=says):
        read(made)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"[" * 200_000, "nested too deeply", id="lists"),
        pytest.param(b'{"version":1,"state":' + b'{"a":' * 300 + b"1" + b"}" * 301, "nested too deeply", id="objects"),
        (b"", "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
        (b"[]", "no JSON"),
        (b"null", "no JSON"),
        pytest.param(b'{"version":' + b"9" * 5_000 + b"}", "no JSON", id="digits"),
        (b'{"version":NaN}', "no COMMIT"),
        (b'{"version":true}', "no COMMIT"),
        (b'{"version":1}', "seal"),
        (b'{"version":1,"seal":5}', "seal"),
        (b'{"version":1,"job":"\\ud800","seal":""}', "no JSON"),
        pytest.param(bytes(COMMIT_BYTES_MAX + 1), "at most", id="bytes"),  # four times as long as text
    ],
)
def test_what_is_no_json_of_ours_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidCommit, match=says):
        parse_commit(data, step=STEP, folder=FOLDER)


def test_a_newer_format_is_not_called_damaged() -> None:
    with pytest.raises(NewerCommit, match="its format version is 3, and this Muster reads up to 2; upgrade") as newer:
        parse_commit(b'{"version": 3, "attempt": 3, "committedAt": 5.5, "new": []}', step=STEP, folder=FOLDER)
    assert (newer.value.attempt, newer.value.committed_at) == (3, 5.5)


def cut(shape: list[int], chunks: list[tuple[list[int], list[int]]]) -> Callable[[], Commit]:
    made = document(files=len(chunks))
    names = [name for name in made["tensors"] if name.endswith(("0", "exp_avg", "exp_avg_sq"))]
    for number, name in enumerate(names):
        made["tensors"][name] = {
            "dtype": "U8", "shape": shape,
            "pieces": [
                {"file": f, "name": name, "offset": o, "extent": e, "start": 1000 + number * 100}
                for f, (o, e) in enumerate(chunks)
            ],
        }  # fmt: skip
    for file in made["files"]:
        file["bytes"] = 2000
    return lambda: read(made)


def test_slices_may_be_cut_in_any_way_that_covers() -> None:
    quarters = [([0, 0], [1, 2]), ([0, 2], [1, 2]), ([1, 0], [3, 1]), ([1, 1], [3, 3])]
    assert cut([4, 4], quarters)()
    pinwheel = [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])]
    assert cut([3, 3], pinwheel)(), "no straight cut divides these"
    lying = [*pinwheel[:4], ([0, 0], [1, 1])]
    with pytest.raises(InvalidCommit, match="its slices overlap"):
        cut([3, 3], lying)()


def test_as_many_slices_as_ever_are_read_in_the_time_of_a_test() -> None:
    """75,000 slices take about 1 s, most of it JSON; each compared with each other, they would take hours."""
    made = document(tensors=75, files=334)
    assert sum(len(tensor["pieces"]) for tensor in made["tensors"].values()) == 75_225
    data = sealed(made)
    parse_commit(data, step=STEP, folder=FOLDER)
    tangled = document(files=500)
    for number, piece in enumerate(tangled["tensors"]["model/0"]["pieces"]):
        piece["offset"], piece["extent"] = [number % 3, 0], [2, 3]
    with pytest.raises(InvalidCommit, match="overlap"):
        read(tangled)


def in_eight_bits() -> Document:
    """Moments in eight bits, with a scale for each block of three values of a row."""
    made = document(start=False)
    for moment in ("exp_avg", "exp_avg_sq"):
        entry = made["tensors"][f"optimizer/0/{moment}"]
        entry["dtype"], scales = "U8", copy.deepcopy(entry)
        name = f"optimizer/0/{moment}_absmax"
        scales |= {"dtype": "F32", "shape": [entry["shape"][0], 1]}
        for piece in scales["pieces"]:
            piece["name"], piece["extent"] = name, [piece["extent"][0], 1]
        made["tensors"][name] = scales
    return made


def test_state_in_eight_bits_has_its_scales() -> None:
    assert read(in_eight_bits()).tensors["optimizer/0/exp_avg"].dtype == "U8"
    lost, alone, wrong = in_eight_bits(), in_eight_bits(), in_eight_bits()
    del lost["tensors"]["optimizer/0/exp_avg_absmax"]
    alone["tensors"]["optimizer/0/exp_avg"]["dtype"] = "I8"
    wrong["tensors"]["optimizer/0/exp_avg_absmax"]["shape"] = [4, 2]
    for piece in wrong["tensors"]["optimizer/0/exp_avg_absmax"]["pieces"]:
        piece["extent"] = [2, 2]
    for made, says in ((lost, "scales of what is in eight bits"), (alone, "nothing in eight bits"), (wrong, "blocks")):
        with pytest.raises(InvalidCommit, match=says):
            read(made)
