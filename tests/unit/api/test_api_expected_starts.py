"""Expected starts of queued jobs: known where the nodes that they get have an expected end, and unknown elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from muster.api.core.callers import Principal, Scope
from muster.api.core.roles import Role
from muster.api.core.waits.live import LiveJob
from muster.api.core.waits.starts import expected_starts, holder_documents, wait_words
from muster.words.fleet import FleetReport, NodeReport
from muster.words.times import rfc3339

NOW = 1_000.0
ANN = Principal("t", "ann", frozenset({Scope.READ}), roles={"nlp": Role.VIEWER})


def fleet(*nodes: str, gpus: int = 0, **more: Any) -> FleetReport:
    return FleetReport(at=1.0, nodes=tuple(NodeReport(name=n, pool="p", capacity="spot", gpus=gpus) for n in nodes))


def running(seq: int, nodes: str, left: float | None, gpus: int = 0, **more: Any) -> LiveJob:
    progress = {"at": rfc3339(NOW - 10), "etaSeconds": left}
    status = {"gang": {"nodes": nodes.split()}, "progress": progress}
    spec = {"gang": {"nodes": len(nodes.split()), "gpusPerNode": gpus}}
    return LiveJob(seq, f"r{seq}", f"runs-{seq}", more.get("project", "nlp"), "bob", 0, 1.0, "Running", spec, status)


def queued(seq: int, nodes: int = 1, gpus: int = 0, code: str = "AwaitingCapacity") -> LiveJob:
    spec = {"gang": {"nodes": nodes, "gpusPerNode": gpus}}
    return LiveJob(seq, f"q{seq}", f"waits-{seq}", "nlp", "bob", 0, 1.0, "Queued", spec, {"code": code})


def seconds(report: FleetReport, *jobs: LiveJob) -> dict[str, float | None]:
    return {job: start.seconds for job, start in expected_starts(report, jobs, NOW).items()}


def test_a_job_starts_when_enough_nodes_are_free() -> None:
    jobs = [running(1, "a", 70.0), running(2, "b", 310.0), running(3, "c", 910.0)]
    assert seconds(fleet("a", "b", "c"), *jobs, queued(9)) == {"q9": 60.0}, "what passed since its progress was seen"
    assert seconds(fleet("a", "b", "c"), *jobs, queued(9, nodes=2)) == {"q9": 300.0}
    assert seconds(fleet("a", "b", "c", "d"), *jobs, queued(9, nodes=2)) == {"q9": 60.0}, "a free node, and the first"


def test_what_nobody_knows_is_not_said() -> None:
    unknown = running(1, "a", None)
    assert seconds(fleet("a"), unknown, queued(9)) == {"q9": None}, "a program that reports no progress"
    assert seconds(fleet("a"), running(1, "a", 60.0), queued(9, nodes=2)) == {"q9": None}, "it never fits"
    assert seconds(fleet("a"), queued(9)) == {"q9": None}, "something else keeps it waiting"
    assert seconds(fleet("a"), running(1, "a", 60.0), queued(9, code="ProjectLimit")) == {}


def test_a_job_behind_another_gets_the_nodes_that_are_left() -> None:
    jobs = [running(1, "a", 70.0), running(2, "b", 310.0), queued(8), queued(9), queued(10)]
    assert seconds(fleet("a", "b"), *jobs) == {"q8": 60.0, "q9": 300.0, "q10": None}


def test_gpus_of_one_node_are_counted() -> None:
    jobs = [running(1, "a", 70.0, gpus=4), running(2, "a", 310.0, gpus=4)]
    assert seconds(fleet("a", gpus=8), *jobs, queued(9, gpus=4)) == {"q9": 60.0}
    assert seconds(fleet("a", gpus=8), *jobs, queued(9, gpus=8)) == {"q9": 300.0}
    assert seconds(fleet("a", gpus=8), *jobs, queued(9, gpus=16)) == {"q9": None}


@pytest.mark.parametrize(
    ("jobs", "ahead", "words"),
    [
        (
            [running(1, "a", 730.0, gpus=2)],
            0,
            "runs-1, which holds 2 GPUs, is expected to end in 12m00s; so this job is expected to start in about "
            "12m00s",
        ),
        (
            [running(1, "a", None, gpus=2)],
            0,
            "runs-1, which holds 2 GPUs, says no time of its end yet; when this job starts is not known",
        ),
        (
            [running(1, "a", None, gpus=2, project="cv")],
            1,
            "a job of another project holds 2 GPUs; 1 job in the queue before this one: when it starts is not known",
        ),
    ],
)
def test_the_wait_in_words(jobs: list[LiveJob], ahead: int, words: str) -> None:
    start = expected_starts(fleet("a", gpus=2), [*jobs, queued(9, gpus=2)], NOW)["q9"]
    assert wait_words(start, holder_documents(start, ANN, NOW), ahead) == words
