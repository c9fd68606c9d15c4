"""What the operator tells Prometheus of each job: as its status has it, and no longer than it is of use."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.core.seen import NOW, running

from muster.operator.core.fleet import JobSummary
from muster.operator.job_metrics import FAMILIES, FINISHED_SECONDS, PREFIX, job_page
from muster.words.prices import InstancePrice, Prices
from muster.words.status import Attempt, CheckpointStatus, GoodputAccount, GoodputState, Phase, Progress, Restarts

PRICES = Prices(types={"p5": InstancePrice(gpus=8, on_demand=40.0, spot=10.0)})


def job(**status: Any) -> JobSummary:
    seen = running()
    attempt = Attempt(
        number=1, created_at=NOW - 3600.0, workers=2, gpus_per_worker=8, instance_type="p5", capacity="spot"
    )
    told = {
        "progress": Progress(at=NOW - 3.0, step=7, loss=1.5, tokens_per_second=99.0),
        "checkpoint": CheckpointStatus(step=5, committed_at=NOW - 60.0, uri="s3://x"),
        "restarts": Restarts(total=2, by_cause={"hang": 2}),
        "ledger": GoodputAccount(seconds={"productive": 3.0, "lost": 1.0}, since=NOW),
        "attempts": (attempt,),
    }
    return JobSummary("uid", "team", "llama", NOW, False, seen.spec, seen.status.model_copy(update=told | status))


def read(*jobs: JobSummary) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(job_page(jobs, PRICES, NOW)):
        for sample in family.samples:
            labels = dict(sample.labels)
            place = {key: labels.pop(key) for key in ("job_uid", "job_name", "job_namespace", "job_project")}
            assert list(place.values()) == ["uid", "llama", "team", "default"]
            found.setdefault(sample.name.removeprefix(PREFIX), []).append((labels, sample.value))
    return found


def test_each_job_is_told_as_its_status_has_it() -> None:
    one = {"attempt": "1"}
    assert read(job()) == {
        "phase": [({"phase": "Running"}, 1.0)],
        "attempt": [({}, 1.0)],
        "workers_wanted": [({}, 2.0)],
        "workers_ready": [({}, 2.0)],
        "step": [(one, 7.0)],
        "last_step_timestamp_seconds": [(one, NOW - 3.0)],
        "loss": [(one, 1.5)],
        "tokens_per_second": [(one, 99.0)],
        "last_commit_step": [({}, 5.0)],
        "last_commit_timestamp_seconds": [({}, NOW - 60.0)],
        "goodput_seconds": [({"state": "productive"}, 3.0), ({"state": "lost"}, 1.0)],
        "restarts_total": [({"cause": "hang"}, 2.0)],
        "gpu_seconds": [({"capacity": "spot"}, 16 * 3600.0)],
        "cost_dollars": [({}, 20.0)],
        "saved_dollars": [({}, 60.0)],
        "unpriced_seconds": [({}, 0.0)],
    }


@pytest.mark.parametrize(("ago", "told"), [(FINISHED_SECONDS - 1, True), (FINISHED_SECONDS + 1, False)])
def test_a_job_that_is_over_is_told_until_it_was_scraped(ago: float, told: bool) -> None:
    assert bool(read(job(phase=Phase.SUCCEEDED, finished_at=NOW - ago))) is told


def test_nobody_is_told_of_where_there_are_no_jobs() -> None:
    families = {family.name for family in text_string_to_metric_families(job_page((), PRICES, NOW))}
    assert families == {PREFIX + name.removesuffix("_total") for name in FAMILIES}


def test_states_are_those_of_the_ledger() -> None:
    seconds = {str(state): 1.0 for state in GoodputState}
    assert len(read(job(ledger=GoodputAccount(seconds=seconds, since=NOW)))["goodput_seconds"]) == len(GoodputState)
