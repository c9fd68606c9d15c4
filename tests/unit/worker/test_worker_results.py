"""Results of a program are few named numbers, or left out with the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from muster.words.signals import WorkerExit
from muster.worker import exit_record
from muster.worker.reports import TERMINATION_BYTES_MAX, termination_message
from muster.worker.results import NUMBERS_MAX, RESULTS_BYTES_MAX, read_results


def test_named_numbers_are_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"arc/acc": 0.25, "count": 3}')
    assert read_results(str(path)) == ({"arc/acc": 0.25, "count": 3.0}, "")


def test_a_program_need_not_leave_any(tmp_path: Path) -> None:
    assert read_results(str(tmp_path / "results.json")) == ({}, "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1, 2]", "must be one JSON object of named numbers"),
        ('{"acc": "0.5"}', "'acc' must be a number, not \"0.5\""),
        ('{"acc": true}', "'acc' must be a number, not true"),
        ('{"acc": {"none": 1}}', "'acc' must be a number, not {\"none\": 1}"),
        ('{"acc": NaN}', "'acc' must be a finite number, not nan"),
        ('{"acc": 1' + "0" * 400 + "}", "'acc' must be a finite number"),
        ('{" ": 1}', "must be 1 to 100 printable characters"),
        ('{"a\\nb": 1}', "must be 1 to 100 printable characters"),
        (json.dumps({"x" * 101: 1}), "must be 1 to 100 printable characters"),
        (json.dumps({str(number): 1 for number in range(NUMBERS_MAX + 1)}), "it has 51 entries; at most 50"),
        (json.dumps({f"{number:090}": 1 for number in range(30)}), "at most 2000: report fewer"),
        (json.dumps({chr(233 + number) * 99: 1 for number in range(10)}), "at most 2000"),
        (" " * 1_000_001, "is larger than"),
    ],
)
def test_a_bad_file_counts_as_a_whole_for_nothing(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    results, fault = read_results(str(path))
    assert results == {}
    assert str(path) in fault
    assert reason in fault


def test_a_link_or_a_fifo_is_no_file_of_results(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to("secret")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        results, fault = read_results(str(tmp_path / name))
        assert (results, bool(fault)) == ({}, True)


def test_the_largest_results_fit_a_termination_message_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    many = {f"task-{number}/acc": 0.123456789 for number in range(49)}
    many["x" * 100] = 1.0
    assert len(json.dumps(many)) <= RESULTS_BYTES_MAX
    path.write_text(json.dumps(many))
    results, _ = read_results(str(path))
    (tmp_path / "rank-0.json").write_text(json.dumps({"rank": 0, "doing": "x" * 3_000}))
    record = {**exit_record.record(0, "words " * 400), "results": results, "logTail": "y" * 20_000}
    text = termination_message(record, str(tmp_path))
    assert len(text.encode()) <= TERMINATION_BYTES_MAX
    assert WorkerExit.model_validate_json(text).results == many
