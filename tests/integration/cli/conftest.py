"""Houses: one per module for tests that only use the platform, one per test for those that break it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.cli.house import House
from tests.polling import eventually


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """Not started."""
    house = House(tmp_path)
    yield house
    house.close()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Up; at the end it must stop as it should and leave nothing."""
    house = House(tmp_path_factory.mktemp("platform"))
    try:
        house.up("--stop-jobs")
        yield house
        code, errors = house.stop(signal.SIGTERM)
        assert code == 0, errors
        eventually(lambda: not house.processes(), "the last process to be gone")
    finally:
        house.close()
