"""Consoles of each test's own: one that was made for another test's streams and width would show through."""

from collections.abc import Iterator

import pytest

from muster.cli import output


@pytest.fixture(autouse=True)
def fresh_consoles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(output._OutputFormat, "json", False)
    output.answers.cache_clear()
    output.messages.cache_clear()
    yield
    output.answers.cache_clear()
    output.messages.cache_clear()
