"""`make test-changed` runs the test files that a change can reach, and few others."""

import pytest
from tests.tidy.repository import ROOT
from tools import changed_tests


@pytest.mark.parametrize(
    ("changed", "reached", "spared"),
    [
        # By an import that is not the test's own.
        ("operator/muster/operator/core/budgets.py", "tests/sim/test_sim.py", "tests/unit/models"),
        # The worker is a process that the operator starts, which `muster up` starts.
        ("trainer_image/muster/trainer/launch/worker.py", "tests/integration/cli/test_cli_up.py", "tests/unit/core"),
        # The process that makes a model is started by a module that the test imports.
        ("trainer_image/muster/trainer/convert/export.py", "tests/integration/api/test_api_exports.py", "tests/sim"),
        ("tests/integration/api/webhook_receiver.py", "tests/integration/web/test_web_webhooks.py", "tests/unit"),
        ("tests/integration/api/conftest.py", "tests/integration/api/test_api_jobs.py", "tests/unit"),
        ("helm/muster/values.yaml", "tests/unit/packaging/test_packaging_monitoring.py", "tests/unit/core"),
        ("services/muster/agent/xid.json", "tests/unit/agent/test_agent_xid.py", "tests/unit/core"),
        (
            "tests/integration/web/test_web_webhooks.py",
            "tests/integration/web/test_web_webhooks.py",
            "tests/integration/api",
        ),
        ("pyproject.toml", "tests/unit/core/test_core_budgets.py", "none"),
    ],
)
def test_a_change_reaches_who_uses_it_and_spares_the_rest(changed: str, reached: str, spared: str) -> None:
    found = changed_tests.reached([changed])
    assert (ROOT / changed).exists()
    assert reached in found
    assert [path for path in found if path.startswith(f"{spared}/")] == []


def test_a_document_reaches_only_the_tests_that_name_it() -> None:
    assert changed_tests.reached(["docs/simulation.md"]) == ["tests/unit/shell/test_changed_tests.py"]
