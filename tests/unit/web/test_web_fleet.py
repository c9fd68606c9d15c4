"""The fleet: tiles of nodes, and what was recovered."""

from __future__ import annotations

from typing import Any

from muster.web.fleet_view import FaultRecovery, pools, recoveries, time_spent

NOW = 1_795_000_000.0


def node(name: str, pool: str = "a", **more: Any) -> dict[str, Any]:
    known = {"gpus": 8, "freeGpus": 8, "othersGpus": 0, "unfit": "", "heldBy": [], "notices": [], "avoidedBy": []}
    return {"name": name, "pool": pool, **known, **more}


def test_a_node_is_free_held_partly_held_used_by_others_or_unfit() -> None:
    holder = {"project": "nlp", "job": "base", "id": "x", "workers": 1, "gpus": 8}
    hidden = {**holder, "project": "another project", "job": None, "id": None}
    found = pools(
        [
            node("n1"),
            node("n2", heldBy=[holder], freeGpus=0),
            node("n3", heldBy=[hidden], freeGpus=4),
            node("n4", othersGpus=2, freeGpus=6),
            node("n5", "spot", unfit="EC2 takes this node back", heldBy=[holder], freeGpus=0),
        ]
    )
    assert [(pool.name, pool.gpus, pool.free) for pool in found] == [("a", 32, 18), ("spot", 8, 0)]
    assert [(tile.state, tile.words) for pool in found for tile in pool.tiles] == [
        ("free", "free, 8 GPUs"),
        ("held", "held by nlp/base"),
        ("part", "held by another project, 4 of 8 GPUs free"),
        ("others", "2 of 8 GPUs used by pods of others"),
        ("unfit", "EC2 takes this node back"),
    ]


def test_recoveries_are_those_of_the_last_day_with_the_time_until_training_went_on() -> None:
    def attempt(number: int, ended: float | None, outcome: str, first: float | None) -> dict[str, Any]:
        return {"number": number, "endedAt": ended, "outcome": outcome, "cause": "hang", "firstStepAt": first}

    attempts = [
        attempt(1, NOW - 90_000, "failed", NOW - 99_000),
        attempt(2, NOW - 500, "preempted", NOW - 80_000),
        attempt(3, NOW - 400, "rejected", None),
        attempt(4, NOW - 100, "resized", NOW - 300),
        attempt(5, NOW - 50, "failed", NOW - 90),
    ]
    found = recoveries([("id", "job", {"attempts": attempts}), ("new", "new", {})], NOW)
    assert [(each.attempt, each.seconds) for each in found] == [(5, None), (3, 100.0), (2, 200.0)]
    over = recoveries([("id", "job", {"attempts": attempts, "phase": "Failed"})], NOW)
    assert [each.attempt for each in over] == [3, 2], "the last attempt is the job's end, and no recovery"
    assert found[0] == FaultRecovery("id", "job", 5, NOW - 50, "hang", "", 0, None)


def test_the_time_of_all_jobs_is_added_up() -> None:
    ledgers: list[dict[str, Any]] = [{"ledger": {"seconds": {"queue": 1.0, "lost": 2.0}}}, {"ledger": None}]
    assert time_spent([*ledgers, {"ledger": {"seconds": {"queue": 3.0}}}]) == {"queue": 4.0, "lost": 2.0}
