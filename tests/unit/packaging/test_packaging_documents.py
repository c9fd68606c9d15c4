"""The documents for users: each message that docs/troubleshooting.md quotes is one of the code, and docs/index.md leads
to every document. README is short."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ("services", "operator", "trainer_image")
MESSAGE = re.compile(r"^### `(.+)`$", re.MULTILINE)
# Where Python joins the parts of a long message: the end of a literal, a line's end, the beginning of the next.
JOINT = re.compile(r"\"\s*\n\s*f?\"")


def fragments(message: str) -> Iterator[str]:
    """The words of a message between what differs."""
    yield from (part for part in (each.strip() for each in message.split("…")) if part)


def messages(text: str) -> list[str]:
    return MESSAGE.findall(text)


def test_each_message_of_the_page_is_one_of_the_code() -> None:
    quoted = messages((ROOT / "docs" / "troubleshooting.md").read_text())
    missing = {part for message in quoted for part in fragments(message)}
    for path in (path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        if not missing:
            break
        text = JOINT.sub("", path.read_text())
        missing = {part for part in missing if part not in text}
    assert len(quoted) > 20
    assert missing == set(), "words that no program says: nobody will look for them"


def test_a_message_has_its_fixed_words() -> None:
    assert messages("### `a … needs …`\n### Words\n") == ["a … needs …"]
    assert [*fragments("a … needs …")] == ["a", "needs"]
    assert JOINT.sub("", 'say("one "\n    f"two")') == 'say("one two")'


def test_the_index_leads_to_every_document() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"]({page}" not in index} == set()


def test_the_readme_is_read_within_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
