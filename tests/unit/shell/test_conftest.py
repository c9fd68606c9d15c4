"""What the tests' own settings are: those of the machine never reach a test, those for the tests do."""

import os
import subprocess
import sys

from tests.tidy.repository import ROOT


def test_only_settings_for_the_tests_reach_a_test() -> None:
    program = "import os, tests.conftest; print(os.environ.get('MUSTERTESTS_CRDS'), os.environ.get('MUSTER_API_TOKEN'))"
    environment = os.environ | {"MUSTERTESTS_CRDS": "/schemas", "MUSTER_API_TOKEN": "secret"}
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["/schemas", "None"]
