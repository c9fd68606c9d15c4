"""The table of `muster usage`."""

from __future__ import annotations

from muster.cli.usage import _cells


def test_the_hours_of_a_short_job_on_cpus_are_shown() -> None:
    amounts = {"gpuHours": 0, "cpuHours": 0.0123, "lostGpuHours": 1234.56, "cost": 0.5, "unpricedHours": 0}
    assert _cells({**amounts, "saved": 0.0, "lostCost": 0.0}) == ("0.0", "0.01", "1,234.6", "0.50", "0.00", "0.00")
