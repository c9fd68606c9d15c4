"""An operator, a Prometheus and an Alertmanager per test, and nothing left of them afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.local.house import House
from tests.integration.monitoring.servers import Alertmanager, Prometheus


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    (tmp_path / "state").mkdir()
    house = House(tmp_path / "state")
    yield house
    house.close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Alertmanager]:
    server = Alertmanager(tmp_path)
    yield server
    server.kill()
