"""docs/programs.md shows what changes in the examples, as it is, and that it is little."""

import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "programs"


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [
        ("plain.py", "plain_with_muster.py", 10),
        ("trainer.py", "trainer_with_muster.py", 10),
        ("plain.py", "plain_with_save.py", 20),
    ],
)
def test_the_page_shows_the_diff_of_few_lines(before: str, after: str, most: int) -> None:
    old, new = ((EXAMPLES / file).read_text().splitlines(keepends=True) for file in (before, after))
    lines = list(difflib.unified_diff(old, new, before, after, n=1))
    assert f"```diff\n{''.join(lines)}```\n" in (ROOT / "docs" / "programs.md").read_text()
    changed = [line for line in lines if line.startswith("+") and not line.startswith("+++") and line.strip() != "+"]
    assert len(changed) <= most
