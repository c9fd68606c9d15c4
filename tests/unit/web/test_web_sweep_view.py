"""Parallel coordinates of a sweep, and how much its parameters matter."""

from __future__ import annotations

from typing import Any

import pytest

from muster.web.sweep_view import BOTTOM, TOP, parallel, rank_correlation, short_names, weights

LR, DECAY = "training.optimizer.lr", "training.optimizer.weightDecay"


def sweep(rows: list[tuple[Any, Any, float | None]], better: str = "lower", **parameters: Any) -> dict[str, Any]:
    given = {LR: {"min": 1e-4, "max": 1e-2, "log": True}, DECAY: {"values": [0.0, 0.1], "log": False}, **parameters}
    table = [
        {"number": number, "parameters": {LR: lr, DECAY: decay}, "value": value}
        for number, (lr, decay, value) in enumerate(rows, 1)
    ]
    done = [row for row in table if row["value"] is not None]
    best = min(done, key=lambda row: row["value"], default={"number": None})["number"]
    metric = {"name": "loss", "better": better}
    return {"table": table, "bestTrial": best, "metric": metric, "sweep": {"parameters": given}}


def test_a_trial_is_a_line_over_its_parameters_to_its_result() -> None:
    picture = parallel(sweep([(1e-2, 0.0, 3.0), (1e-3, 0.1, 2.0), (1e-4, 0.0, 4.0), (5e-3, 0.0, None)]))
    assert picture is not None
    assert [axis.short for axis in picture.axes] == ["lr", "weightDecay", "loss"]
    assert [axis.x for axis in picture.axes] == [16.67, 50.0, 83.33]
    assert [tick.words for tick in picture.axes[0].ticks] == ["0.01", "0.0001"]
    best = picture.lines[-1]
    assert (best.number, best.best, best.tone) == (2, True, 1)
    middle = (TOP + BOTTOM) / 2
    assert best.pieces == ((16.67, middle, 50.0, 94.0), (50.0, 94.0, 83.33, TOP)), "by orders of magnitude; lower is up"
    assert best.words == "Trial 2: lr 0.001, weightDecay 0.1, loss 2"
    assert [line.number for line in picture.lines] == [3, 1, 2], "the best is drawn above the others"
    assert parallel(sweep([(1e-3, 0.0, None)])) is None


def test_a_parameter_that_orders_the_trials_has_the_whole_weight() -> None:
    rows = [(1e-4, 0.0, 4.0), (3e-4, 0.1, 3.0), (1e-3, 0.0, 2.0), (3e-3, 0.1, 1.0)]
    first, second = weights(sweep(rows))
    assert (first.short, first.share, first.trials, first.words) == ("lr", 1.0, 4, "higher values did better")
    assert second.short == "weightDecay"
    assert second.share == pytest.approx(0.447, abs=1e-3)
    assert weights(sweep(rows, "higher"))[0].words == "lower values did better"
    assert weights(sweep(rows[:3])) == []
    words = sweep([(name, 0.0, value) for name, value in (("a", 1.0), ("a", 2.0), ("b", 3.0), ("b", 4.0))])
    assert weights(words)[0].share == pytest.approx(0.894, abs=1e-3), "values without an order, by their groups"
    assert weights(words)[0].words == ""
    assert weights(words)[1].share == 0.0, "one value for all says nothing"


def test_ranks_of_equals_are_shared() -> None:
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert short_names(["a.b.lr", "a.c.lr", "rank"]) == ["b.lr", "c.lr", "rank"]
