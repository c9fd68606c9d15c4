"""Following log files: no line is lost, repeated or torn, however it is written and wherever the reader is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.api.core.logs import files
from muster.api.core.logs.files import JobLogs, LogFollower, page, tail_offset
from muster.words.state_folder import StateFolder

TEXT = st.text(alphabet="ab\nü€", max_size=60)


def write(state: StateFolder, attempt: int, worker: int, data: bytes) -> None:
    folder = state.worker("u", attempt, worker)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("ab") as file:
        file.write(data)


@given(st.lists(st.lists(TEXT, max_size=5), min_size=1, max_size=3), st.integers(1, 7), st.integers(1, 5))
def test_what_is_followed_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[list[str]], cut_every: int, piece: int
) -> None:
    state = StateFolder(tmp_path_factory.mktemp("logs"))
    logs = JobLogs(state, "u")
    follower, read, since_cut = LogFollower(logs, 1, 0), [], 0

    def take(final: bool) -> None:
        nonlocal follower, since_cut
        while True:
            for line in follower.lines(final):
                read.append((line.attempt, line.text))
                since_cut += 1
                if since_cut == cut_every:  # the reader is cut and comes back with the id of its last line
                    since_cut = 0
                    follower = LogFollower(logs, None, 0)
                    follower.resume(line.position)
                    break
            else:
                return

    for number, texts in enumerate(attempts, start=1):
        raw = "".join(texts).encode()
        write(state, number, 0, b"")
        if number > 1:
            assert follower.next_attempt()
        for start in range(0, len(raw), piece):  # torn anywhere, in the middle of a letter too
            write(state, number, 0, raw[start : start + piece])
            take(final=False)
        take(final=True)
        take(final=True)
    expected = [
        (number, line.removesuffix("\r"))
        for number, texts in enumerate(attempts, start=1)
        for line in _lines("".join(texts))
    ]
    assert read == expected


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


@given(TEXT, st.integers(0, 10), st.integers(1, 5))
def test_tail_is_the_last_lines(tmp_path_factory: pytest.TempPathFactory, text: str, lines: int, chunk: int) -> None:
    file = tmp_path_factory.mktemp("tail") / "log"
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as small:
        small.setattr(files, "_CHUNK_BYTES", chunk)
        shown = page(file, tail_offset(file, lines)).text
    whole = _lines(text)
    assert _lines(shown) == whole[max(0, len(whole) - lines) :]


def test_a_line_of_megabytes_hides_no_line_of_the_tail(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    lines = ["first", "second", "x" * 3_000_000, "fourth", "last"]
    write(state, 1, 0, "".join(f"{line}\n" for line in ["older", *lines]).encode())
    follower = LogFollower(JobLogs(state, "u"), 1, 0)
    follower.start_at_tail(5)
    read = []
    while found := follower.lines(final=True):
        read += [line.text for line in found]
    assert (read[:2], read[-2:]) == (["first", "second"], ["fourth", "last"])
    assert "".join(read[2:-2]) == lines[2]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_tail_has_a_bound_and_is_never_nothing(tmp_path: Path, end: str) -> None:
    file = tmp_path / "log"
    file.write_text(f"one\n{'x' * 100}\nlast{end}")
    assert page(file, tail_offset(file, 5, bytes_max=20)).text == f"last{end}"
    assert page(file, tail_offset(file, 5, bytes_max=3)).text == f"last{end}"[-3:]


@pytest.mark.parametrize("position", ["", "x", "1", "1/0", "1/0:", "1/0:5,", "-1/0:5", "1/0:5;1:6", "1/0:" + "9" * 20])
def test_a_position_of_somebody_else_is_refused(tmp_path: Path, position: str) -> None:
    with pytest.raises(ValueError):
        LogFollower(JobLogs(StateFolder(tmp_path), "u"), None, 0).resume(position)


def test_positions_come_back(tmp_path: Path) -> None:
    follower = LogFollower(JobLogs(StateFolder(tmp_path), "u"), None, None)
    for position in ("0/", "3/", "3/0:17,1:4"):
        follower.resume(position)
        assert follower.position == position
