"""Job files: YAML 1.2 scalars, the place of every fault, and nothing that multiplies itself."""

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.documents import Document, Place, read_document, set_value
from muster.cli.errors import CliError, Exit
from muster.contract.base import Problem


def read(tmp_path: Path, text: str, name: str = "job.yaml") -> Document:
    path = tmp_path / name
    path.write_text(text)
    return read_document(str(path))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5e3", -1500.0),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-11-20", "2026-11-20"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("!!str 1", "1"),
        ("=", "="),
        ("900Gi", "900Gi"),
        ("10m", "10m"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    found = read(tmp_path, f"value: {text}\n").data["value"]
    assert (type(found), found) == (type(value), value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_comes_back(number: float) -> None:
    document = Document({"spec": {}}, "job.yaml")
    set_value(document, f"spec.x={number!r}")
    assert document.data["spec"]["x"] == number


def test_merge_keys_and_aliases(tmp_path: Path) -> None:
    text = "base: &b {a: 1, b: 2}\nmine: {<<: *b, b: 3}\nboth: {<<: [{a: 5}, *b]}\n"
    assert read(tmp_path, text).data == {"base": {"a": 1, "b": 2}, "mine": {"a": 1, "b": 3}, "both": {"a": 5, "b": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec:\n  a: 1\n  b: [1, 2\n  c: 3\n", "job.yaml, line 4, column 4: expected ',' or ']'"),
        ("spec:\n\ta: 1\n", "job.yaml, line 2, column 1: found character '\\t'"),
        ("a: 1\nb: 2\na: 3\n", "job.yaml, line 3, column 1: the key 'a' stands here and in line 1"),
        ("x:\n  a: 1\n  a: 1\n", "job.yaml, line 3, column 3: the key 'a' stands here and in line 2"),
        ("a: 1\n---\nb: 2\n", "job.yaml, line 3, column 1: a second document starts here"),
        ("a: .inf\n", "job.yaml, line 1, column 4: .inf is not a number"),
        ("a: !!python/object:os.system x\n", "job.yaml, line 1, column 4: !!python/object:os.system x has no meaning"),
        ("a: !mine x\n", "job.yaml, line 1, column 4: !mine x has no meaning"),
        ("[a]: 1\n", "job.yaml, line 1, column 1: a key must be text"),
        ("a: &x [*x]\n", "job.yaml, line 1, column 4: an alias contains itself"),
        ("a: *nowhere\n", "job.yaml, line 1, column 4: found undefined alias 'nowhere'"),
        (f"a: {'9' * 41}\n", "job.yaml, line 1, column 4: is too long for a number"),
    ],
)
def test_faults_are_named_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(text)
    with pytest.raises(CliError) as raised:
        read_document("job.yaml")
    assert str(raised.value).startswith(message)
    assert raised.value.exit_code == Exit.USAGE
    (fault,) = raised.value.faults
    assert fault.excerpt == text.splitlines()[(fault.line or 0) - 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n", "is not a mapping"),
        ("just text\n", "is not a mapping"),
        ("a: " + "[" * 20_000, "is nested too deeply"),
    ],
)
def test_what_is_no_job_at_all(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CliError, match=message) as raised:
        read(tmp_path, text)
    assert raised.value.exit_code == Exit.USAGE


def test_a_billion_laughs_are_refused_quickly(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(CliError, match="does an alias multiply itself"):
        read(tmp_path, "\n".join(lines))


def test_json_files(tmp_path: Path) -> None:
    assert read(tmp_path, '{\n\t"a": 1e-4}', "job.json").data == {"a": 1e-4}
    for text, message in [
        ('{"a": 1,}', r"job.json, line 1, column \d+: "),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ('{"a": NaN}', "nan is not a number"),
    ]:
        with pytest.raises(CliError, match=message):
            read(tmp_path, text, "job.json")


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    (tmp_path / "large.yaml").write_bytes(b"a: " + b"x" * 1_000_001)
    for name, message in [
        ("absent.yaml", "no such file"),
        ("", "is a directory"),
        ("latin.yaml", "not UTF-8 text .byte 3"),
        ("large.yaml", "larger than"),
    ]:
        with pytest.raises(CliError, match=message) as raised:
            read_document(str(tmp_path / name))
        assert raised.value.exit_code == Exit.USAGE


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a: 1\n")))
    document = read_document("-")
    assert (document.data, document.name, document.folder) == ({"a": 1}, "standard input", Path.cwd())


def test_a_problem_of_the_server_finds_its_line(tmp_path: Path) -> None:
    document = read(
        tmp_path, "spec:\n  training:\n    data:\n      train:\n        - source: x\n          formt: text\n"
    )
    fault = document.fault(Problem("spec.training.data.train[0].formt", "unknown key", "format"))
    assert (fault.line, fault.column, fault.excerpt) == (6, 11, "          formt: text")
    missing = document.fault(Problem("spec.training.batch", "is required"))
    assert (missing.line, missing.column) == (2, 3)
    assert document.fault(Problem("metadata.name", "must be …")).line is None
    assert document.places["spec.training.data.train[0]"] == Place(5, 11)


def test_set_reaches_into_mappings_and_lists() -> None:
    document = Document({"spec": {"training": {"data": {"train": [{"source": "a"}]}}}}, "job.yaml")
    set_value(document, "training.length.steps=10")
    set_value(document, "spec.training.data.train[0].source=b")
    set_value(document, "training.optimizer.lr=1e-4")
    set_value(document, "metadata.name=x")
    assert document.data == {
        "spec": {
            "training": {
                "data": {"train": [{"source": "b"}]},
                "length": {"steps": 10},
                "optimizer": {"lr": 1e-4},
            }
        },
        "metadata": {"name": "x"},
    }


@pytest.mark.parametrize("assignment", ["training", "=1", "training.data.train[3].source=x", "a.b=[1", "a=b: c: d"])
def test_set_refuses_what_leads_nowhere(assignment: str) -> None:
    with pytest.raises(CliError) as raised:
        set_value(Document({"spec": {"training": {"data": {"train": []}}}}, "job.yaml"), assignment)
    assert raised.value.exit_code == Exit.USAGE
