"""The control plane that the cluster's tests share, and the reasons for which they are skipped."""

from collections.abc import Iterator

import pytest
from tests.cluster.controlplane import ControlPlane, missing
from tests.cluster.house import House


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/cluster" in str(item.path)]
    reason = missing() if "cluster" in (config.getoption("markexpr") or "") else "run by `make test-cluster`"
    for item in here:
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="session")
def house(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One cluster for all tests: each has nodes of its own pool and a job of its own name."""
    house = House(plane, tmp_path_factory.mktemp("house"))
    house.install()
    house.namespace("team")
    yield house
    house.close()
