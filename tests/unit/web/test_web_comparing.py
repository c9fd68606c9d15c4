"""What several jobs differ in, and which did best."""

from __future__ import annotations

from typing import Any

from muster.web.comparing import MeasureScore, SettingDifference, differences, scores


def test_only_settings_that_differ_are_told_by_their_paths() -> None:
    one = {"training": {"lr": 1e-4, "data": {"train": [{"source": "a", "weight": 1}]}, "seed": 1}, "gang": {"nodes": 2}}
    two = {"training": {"lr": 1e-3, "data": {"train": [{"source": "b", "weight": 1}]}, "seed": 1}, "gang": {"nodes": 2}}
    three = {**one, "suspend": True}
    assert differences([one, two]) == [
        SettingDifference("training.lr", ("0.0001", "0.001")),
        SettingDifference("training.data.train[0].source", ("a", "b")),
    ]
    assert differences([one, three]) == [SettingDifference("suspend", (None, "true"))]
    assert differences([one]) == differences([]) == []


def curves(losses: list[float | None], **series: Any) -> dict[str, Any]:
    axes = {"tokens": [10 * (index + 1) for index in range(len(losses))]}
    evaluations = {"series": {"loss": {"mean": [2.5]}} if losses else {}}
    return {"axes": axes, "series": {"loss": {"mean": losses}, **series}, "evaluations": evaluations}


def test_the_best_is_the_best_of_those_that_have_a_value_and_none_where_all_are_alike() -> None:
    jobs = [
        {"status": {"restarts": {"total": 2}, "ledger": {"seconds": {"productive": 3.0, "lost": 1.0}}}},
        {"status": {"restarts": {"total": 0}, "ledger": None}},
        {"status": {"restarts": {"total": 0}, "ledger": {"seconds": {"productive": 1.0, "lost": 1.0}}}},
    ]
    thinned = {"loss": {"mean": [3.0, 2.0], "min": [2.9, 0.5], "max": [3.1, 9.0]}}
    found = {
        each.words: each for each in scores(jobs, [curves([3.0, 1.0, None]), curves([]), curves([3.0], **thinned)])
    }
    assert found["Least training loss"].values == (1.0, None, 0.5)
    assert found["Least training loss"].best == {2}, "the least of what a point stands for"
    assert found["Last training loss"].values == (1.0, None, 2.0)
    assert found["Goodput"] == MeasureScore("Goodput", (0.75, None, 0.5), "share", frozenset({0}))
    assert found["Restarts"].best == {1, 2}
    assert found["Best evaluation"].best == frozenset(), "all are alike"
    assert "Tokens per second" not in found
