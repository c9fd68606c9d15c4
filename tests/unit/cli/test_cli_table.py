"""Tables: aligned columns, whole rows in a pipe, wrapped last columns on a terminal, ten thousand rows quickly."""

import io

from rich.console import Console

from muster.cli.render import show_jobs
from muster.cli.table import Styled, Table


def printed(table: Table, width: int = 40, terminal: bool = False) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=terminal, color_system=None, highlight=False).print(
        table, soft_wrap=True
    )
    return stream.getvalue().splitlines()


def example() -> Table:
    table = Table("NAME", ">STEP", "BECAUSE")
    table.add_row("a", "5", "short")
    table.add_row(Styled("long-name", "bold red"), "1,200", "a reason that is longer than the window of this terminal")
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
    table = Table("", "", header=False)
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
