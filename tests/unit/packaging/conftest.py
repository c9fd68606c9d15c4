"""helm itself, or the reason for which its tests are skipped."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tidy.repository import ROOT
from tests.unit.packaging.chart import Chart


def tool(name: str) -> Any:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helm() -> Path:
    script = tool("get_helm")
    try:
        path: Path = script.get_helm()
    except script.NoHelm as error:
        pytest.skip(str(error))
    return path


@pytest.fixture(scope="session")
def chart(helm: Path) -> Chart:
    return Chart(helm)
