"""The drill's page, of outcomes that need no run. The drill itself: `make drill-programs`."""

from pathlib import Path

from tests.drills.programs.kinds import KINDS
from tests.drills.programs.scorecard import LauncherOutcome, Outcome, Results, other_figures

PAGE = Path(__file__).parents[3] / "docs" / "scorecard-programs.md"


def test_the_page_has_each_kind_and_what_deviates(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.add(Outcome("exception", "a rank raises once", "unknown", "unknown", 0.2, 5.0, 3, 2, "Succeeded", "E: x"))
    results.add(Outcome("disk-full", "a full disk", "storage", deviations=["the cause is none, not storage"]))
    results.add_elsewhere(LauncherOutcome("torchrun", "exception", 7.0, 4, "done"))
    again = Results(tmp_path / "results.json")
    page = again.page("Beside a load of 12.")
    assert "| `exception` | a rank raises once | unknown | unknown | 0.20 s | 5.0 s | 3 | Succeeded | yes |" in page
    assert "| `exception` | 5.0 s, 3 lost, succeeded | 7.0 s, 4 lost, done |" in page
    assert "- `disk-full`: the cause is none, not storage" in page
    assert "2 kinds of faults, 1 with the cause that was injected, 1 not as they ought to be" in page
    assert not again.good


def test_the_committed_page_has_every_kind() -> None:
    page = PAGE.read_text()
    assert [kind.name for kind in KINDS if f"| `{kind.name}` |" not in page] == []


def test_figures_of_other_commands_stay_at_the_end_of_the_page() -> None:
    end = other_figures(PAGE.read_text())
    assert end.startswith("\n## Other commands\n")
    assert other_figures(Results().page() + end) == end
    assert other_figures(Results().page()) == ""
