"""Tables: aligned columns, whole rows in a pipe, wrapped last columns on a terminal, ten thousand rows quickly."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from muster.cli.errors import CliError
from muster.cli.follow import print_line
from muster.cli.jobs import _last_samples
from muster.cli.output import answers, print_json, print_json_line, say, show_error
from muster.cli.render import show_jobs, show_samples
from muster.cli.table import StyledCell, TextTable
from muster.client.errors import MusterError


def printed(table: TextTable, width: int = 40, terminal: bool = False) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=terminal, color_system=None, highlight=False).print(
        table, soft_wrap=True
    )
    return stream.getvalue().splitlines()


def example() -> TextTable:
    table = TextTable("NAME", ">STEP", "BECAUSE")
    table.add_row("a", "5", "short")
    table.add_row(
        StyledCell("long-name", "bold red"), "1,200", "a reason that is longer than the window of this terminal"
    )
    return table


def test_columns_are_aligned_and_a_pipe_gets_whole_rows() -> None:
    assert printed(example()) == [
        "NAME        STEP  BECAUSE",
        "a              5  short",
        "long-name  1,200  a reason that is longer than the window of this terminal",
    ]


def test_a_terminal_wraps_the_last_column_below_itself() -> None:
    assert printed(example(), terminal=True)[2:] == [
        "long-name  1,200  a reason that is",
        "                  longer than the window",
        "                  of this terminal",
    ]
    assert len(printed(example(), width=30, terminal=True)) == 3, "no room to wrap into"


def test_cells_of_wide_characters_and_several_lines() -> None:
    table = TextTable("", "", header=False)
    table.add_row("模型", "one\ntwo")
    table.add_row("abcd", "[not markup]")
    assert printed(table) == ["模型  one", "      two", "abcd  [not markup]"]


def test_styles_reach_the_terminal() -> None:
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=True, color_system="standard").print(example(), soft_wrap=True)
    assert "\x1b[1;31mlong-name\x1b[0m" in stream.getvalue()


def job(number: int) -> dict[str, object]:
    return {
        "name": f"job-{number}", "phase": "Suspended", "step": 3, "steps": 10, "loss": 2.5, "tokensPerSecond": 7.0,
        "etaSeconds": 4.0, "attempt": 1, "restarts": 0, "createdAt": 0.0, "because": "it was asked to wait",
    }  # fmt: skip


def test_ten_thousand_jobs_have_one_header(capsys) -> None:  # type: ignore[no-untyped-def]
    show_jobs([job(n) for n in range(start, start + 500)] for start in range(0, 10_000, 500))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10_001, "one header"
    assert lines[0].split()[0] == "NAME"
    assert lines[10_000].startswith("job-9999  Suspended  3/10  2.5000")


@pytest.mark.parametrize(
    ("width", "missing", "there"),
    [(200, (), ("RESTARTS", "AGE")), (80, ("RESTARTS", "ATTEMPT"), ("AGE", "LOSS")), (60, ("ETA", "AGE"), ("LOSS",))],
)
def test_the_list_fits_the_terminal(
    width: int, missing: tuple[str, ...], there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr("muster.cli.render.answers", lambda: console)
    because = "worker 0 failed: " + "a long story " * 20
    show_jobs([[{**job(n), "because": because} for n in range(3)], [job(3)]])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5, "a line for each job"
    assert max(map(len, lines)) <= width
    assert lines[1].endswith("...")
    titles = lines[0].split()
    assert not set(missing) & set(titles)
    assert {*there, "NAME", "PHASE", "BECAUSE"} <= set(titles)


def evaluation(count: int) -> dict[str, Any]:
    samples = [{"prompt": f"Say\n{n}", "text": f"[{n}]", "finished": n % 2 == 0} for n in range(count)]
    return {"step": 1200, "attempt": 2, "at": "2026-01-01T00:00:00Z", "samples": samples}


def test_samples_are_shown_on_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    show_samples(evaluation(2))
    show_samples(evaluation(6) | {"step": 7})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("samples of step 1,200, attempt 2, ")
    assert lines[2:6] == ["  > Say 0", "    [0]", "  > Say 1", "    [1] …"]
    assert lines[7].startswith("samples of step 7, ")
    assert (len(lines[8:]), lines[-1]) == (9, "  and 2 more: muster samples JOB")
    show_samples(evaluation(1) | {"samples": [{"prompt": "a" * 500, "text": "b " * 500, "finished": True}]})
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 104


def test_no_text_of_others_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    orders = "\x1b]0;owned\x07 \x1b[2Jtwo\r \u202eeno"
    show_samples(evaluation(1) | {"samples": [{"prompt": orders, "text": orders, "finished": True}]})
    table = TextTable("JOB", "WHY")
    table.add_row(StyledCell(orders, "bold"), f"{orders}\nsecond line")
    answers().print(table)
    say(orders, "red")
    show_error(CliError(orders, next_step=orders))
    print_line(f"{orders} \x9b31m \u2066 \ttab")
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert text.count("two") == text.count("·eno") >= 3
        assert "owned" not in text
        assert not set(text) & set("\x1b\x07\r\u202e\x9b\u2066")
    assert "second line" in printed.out.splitlines()[-2]
    assert printed.out.splitlines()[-1].endswith("\ttab")


def test_documents_steer_no_terminal_and_hold_what_they_held(capsys: pytest.CaptureFixture[str]) -> None:
    """As the lines of `muster logs --json`, which a worker wrote; half a character can't even be printed."""
    line = {"text": "\x1b]0;owned\x07 \x9b31m \u202e \u2066 \x7f é\ttab \ud83d"}
    for show in (print_json, print_json_line):
        show(line)
        shown = capsys.readouterr().out
        assert not set(shown) & set("\x1b\x07\x9b\u202e\u2066\x7f\ud83d")
        assert "é" in shown
        assert json.loads(shown) == line


def test_the_last_samples_are_asked_for_where_there_are_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    class Answers:
        asked = 0

        def get(self, path: str, **params: Any) -> Any:
            self.asked += 1
            if path == "jobs/away/samples":
                raise MusterError("the storage is away")
            return {"items": [evaluation(1)] if path == "jobs/one/samples" else [], "total": 1}

    def job(uid: str, **given: Any) -> dict[str, Any]:
        return {"id": uid, "spec": {"training": {"evaluation": given or None}}}

    client: Any = Answers()
    assert _last_samples(client, job("one")) is None
    assert _last_samples(client, job("one", every=5)) is None
    assert client.asked == 0
    assert _last_samples(client, job("one", generate={"prompts": ["Say"]})) == evaluation(1)
    assert _last_samples(client, job("none", generate={"prompts": ["Say"]})) is None
    assert _last_samples(client, job("away", generate={"prompts": ["Say"]})) is None
    assert "its samples are left out: the storage is away" in capsys.readouterr().err
