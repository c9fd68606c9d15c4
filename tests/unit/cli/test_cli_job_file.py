"""Job files: where they come from, the line of every fault, and --set."""

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.errors import CliError, ExitStatus
from muster.cli.job_file import JobFile, in_place_of_others, read_job_file, set_value
from muster.words.base import DocumentProblem


def read(tmp_path: Path, text: str, name: str = "job.yaml") -> JobFile:
    path = tmp_path / name
    path.write_text(text)
    return read_job_file(str(path))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_comes_back(number: float) -> None:
    document = JobFile({"spec": {}}, "job.yaml")
    set_value(document, f"spec.x={number!r}")
    assert document.data["spec"]["x"] == number


def test_a_setting_stands_in_place_of_what_it_excludes(tmp_path: Path) -> None:
    file = read(tmp_path, "spec: {training: {length: {epochs: 3}, model: {source: a, revision: b}}}")
    set_value(file, "training.length.steps=5")
    set_value(file, "spec.training.model.preset=muster-1m")
    assert file.data["spec"]["training"] == {"length": {"steps": 5}, "model": {"preset": "muster-1m", "revision": "b"}}
    patch = in_place_of_others({"training": {"length": {"steps": 5}, "optimizer": {"lr": 1}}})
    length = {"steps": 5, "tokens": None, "epochs": None}
    assert patch == {"training": {"length": length, "optimizer": {"lr": 1}}}
    assert in_place_of_others({"gang": {"nodes": 2}}) == {"gang": {"nodes": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec:\n\ta: 1\n", "job.yaml, line 2, column 1: found character"),
        ("a: 1\nb: 2\na: 3\n", "job.yaml, line 3, column 1: the key 'a' stands here and in line 1"),
        ("a: 1\n---\nb: 2\n", "job.yaml, line 2, column 1: a second document starts here"),
    ],
)
def test_faults_are_named_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(text)
    with pytest.raises(CliError) as raised:
        read_job_file("job.yaml")
    assert str(raised.value).startswith(message)
    assert raised.value.exit_code == ExitStatus.USAGE
    (fault,) = raised.value.faults
    assert fault.excerpt == text.splitlines()[(fault.line or 0) - 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n", "is not a mapping"),
        ("just text\n", "is not a mapping"),
        ("a: " + "[" * 20_000, "is nested deeper than 64 levels"),
    ],
)
def test_what_is_no_job_at_all(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CliError, match=message) as raised:
        read(tmp_path, text)
    assert raised.value.exit_code == ExitStatus.USAGE


def test_json_files(tmp_path: Path) -> None:
    assert read(tmp_path, '{\n\t"a": 1e-4}', "job.json").data == {"a": 1e-4}
    for text, message in [
        ('{"a": 1,}', r"job.json, line 1, column \d+: "),
        ('{"a": 1, "a": 2}', r"line 1, column 10: the key 'a' stands here"),
        ('{"a": NaN}', "NaN is not a word of JSON"),
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
            read_job_file(str(tmp_path / name))
        assert raised.value.exit_code == ExitStatus.USAGE


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a: 1\n")))
    document = read_job_file("-")
    assert (document.data, document.name, document.folder) == ({"a": 1}, "standard input", Path.cwd())


def test_a_problem_of_the_server_finds_its_line(tmp_path: Path) -> None:
    file = read(tmp_path, "spec:\n  training:\n    data:\n      train:\n        - source: x\n          formt: text\n")
    fault = file.fault(DocumentProblem("spec.training.data.train[0].formt", "unknown key", "format"))
    assert (fault.line, fault.column, fault.excerpt) == (6, 11, "          formt: text")
    assert file.fault(DocumentProblem("metadata.name", "must be …")).line is None


def test_set_reaches_into_mappings_and_lists() -> None:
    document = JobFile({"spec": {"training": {"data": {"train": [{"source": "a"}]}}}}, "job.yaml")
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
        set_value(JobFile({"spec": {"training": {"data": {"train": []}}}}, "job.yaml"), assignment)
    assert raised.value.exit_code == ExitStatus.USAGE
