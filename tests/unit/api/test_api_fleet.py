"""The queue and the nodes, put together for callers who see more and less."""

from __future__ import annotations

from typing import Any

from muster.api.core.callers import Principal, Scope
from muster.api.core.fleet.views import node_documents, queue_documents
from muster.api.core.roles import Role
from muster.api.core.waits.live import LiveJob
from muster.words.fleet import FleetReport, NodeReport
from muster.words.times import rfc3339

ANN = Principal("t", "ann", frozenset({Scope.READ}), roles={"nlp": Role.VIEWER})
ADMIN = Principal("t", "root", frozenset({Scope.READ}), admin=True)
GPUS = {"gang": {"nodes": {"min": 2, "max": 4}, "gpusPerNode": 8}}


def job(seq: int, name: str, project: str, phase: str, priority: int = 0, **status: Any) -> LiveJob:
    return LiveJob(seq, f"id-{name}", name, project, "bob", priority, 100.0, phase, GPUS, status)


QUEUE = [
    job(1, "old", "nlp", "Queued", queuedAt=rfc3339(150.0), code="AwaitingCapacity", because="none is free"),
    job(2, "theirs", "cv", "Queued", priority=5),
    job(3, "urgent", "nlp", "Queued", priority=5),
    job(4, "runs", "nlp", "Running", gang={"nodes": ["a", "b"]}, attempts=[{"createdAt": rfc3339(120.0)}]),
    job(5, "runs-too", "cv", "Running", gang={"nodes": ["b", "b"]}, excludedNodes=[
        {"node": "a", "until": rfc3339(900.0), "why": "Xid 79"}]),
]  # fmt: skip


def test_places_in_the_queue_count_jobs_that_one_does_not_see() -> None:
    queued, (nlp,) = queue_documents(QUEUE, {"nlp": {"gpus": 32}}, ANN, {})
    assert queued == 3
    assert [(each["position"], each["name"], each["gpus"]) for each in nlp["waiting"]] == [
        (2, "urgent", 16),
        (3, "old", 16),
    ]
    assert nlp["waiting"][1]["since"] == rfc3339(150.0)
    assert nlp["waiting"][0]["since"] == rfc3339(100.0), "nobody has looked at it yet: since it was submitted"
    assert nlp["holding"] == [
        {"id": "id-runs", "name": "runs", "owner": "bob", "phase": "Running", "nodes": 2, "gpus": 16,
         "since": rfc3339(120.0), "etaSeconds": None}
    ]  # fmt: skip
    assert (nlp["gpus"], nlp["gangs"], nlp["processes"], nlp["quota"]) == (16, 1, 16, {"gpus": 32})
    _, everything = queue_documents(QUEUE, {"nlp": {}, "cv": {}}, ADMIN, {})
    assert [[each["position"] for each in project["waiting"]] for project in everything] == [[1], [2, 3]]


def report(**more: Any) -> FleetReport:
    node = {"pool": "p", "capacity": "spot", "gpus": 32}
    return FleetReport(at=1.0, nodes=(NodeReport(name="a", **node), NodeReport(name="b", **node | more)))


def test_jobs_of_others_are_not_named_and_are_counted() -> None:
    first, second = node_documents(report(others_gpus=3), QUEUE, ANN)
    mine = {"project": "nlp", "id": "id-runs", "job": "runs", "workers": 1, "gpus": 8}
    assert first["heldBy"] == [mine]
    hidden = {"project": "another project", "id": None, "job": None}
    assert second["heldBy"] == [mine, hidden | {"workers": 2, "gpus": 16}]
    assert (first["freeGpus"], second["freeGpus"]) == (24, 32 - 3 - 8 - 16)
    assert first["avoidedBy"] == [hidden | {"until": rfc3339(900.0), "why": None}]
    assert "theirs" not in str((first, second))
    assert "cv" not in str((first, second))
    first, second = node_documents(report(), QUEUE, ADMIN)
    assert [each["job"] for each in second["heldBy"]] == ["runs", "runs-too"]
    assert first["avoidedBy"][0] == {
        "project": "cv", "id": "id-runs-too", "job": "runs-too", "until": rfc3339(900.0), "why": "Xid 79",
    }  # fmt: skip


def test_a_status_in_words_of_a_newer_operator_does_not_stop_the_answer() -> None:
    odd = job(9, "odd", "nlp", "Running", gang={"nodes": ["a"]}, attempts=[{"createdAt": "soon"}])
    assert queue_documents([odd], {"nlp": {}}, ANN, {})[1][0]["holding"][0]["since"] == rfc3339(100.0)
    assert next(node_documents(report(), [odd], ANN))["freeGpus"] == 24
