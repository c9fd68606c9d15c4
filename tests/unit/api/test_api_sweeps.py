"""A sweep's decisions: which trials there are, which run, which stop; and what is refused of a sweep's document."""

import copy
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.api.core.errors import ApiError
from muster.api.sweeps.decisions import (
    MetricValue,
    SweepRules,
    SweepTrial,
    TrialResults,
    best_of,
    decide,
    is_rung,
    judged,
)
from muster.api.sweeps.examples import EXAMPLE_SWEEP
from muster.api.sweeps.search import trials_of
from muster.api.sweeps.service import parse_document
from muster.documents.document import Document
from muster.recipe.evaluation_config import Better
from muster.recipe.sweep import Asha, Sweep, SweepPhase

EXAMPLE = Path(__file__).parents[3] / "examples" / "sweep-stdlib.yaml"
RANGE = {"a": {"min": 1.0, "max": 2.0}}


def sweep(**words: Any) -> Sweep:
    return Sweep.model_validate({"parameters": RANGE, "trials": 8, **words}, by_alias=True)


# -- which trials there are --------------------------------------------------------------------------------------------


def test_a_grid_tries_every_combination_once() -> None:
    grid = sweep(parameters={"a": {"values": [1, 2]}, "b": {"values": ["x", "y", "z"]}}, search="grid", trials=None)
    assert grid.size == 6
    assert [(each["a"], each["b"]) for each in trials_of(grid)] == [(a, b) for a in (1, 2) for b in ("x", "y", "z")]


def test_a_random_search_covers_its_range_and_draws_no_combination_twice() -> None:
    parameters = {"lr": {"min": 1e-5, "max": 1e-1, "log": True}, "rank": {"min": 4, "max": 7}, "wd": {"values": [0, 1]}}
    found = trials_of(sweep(parameters=parameters, trials=1_000))
    exponents = [sum(each["lr"] >= 10.0**power for power in (-4, -3, -2)) for each in found]
    assert all(200 < exponents.count(order) < 300 for order in range(4)), "orders of magnitude are equally likely"
    assert all(200 < sum(each["rank"] == rank for each in found) < 300 for rank in (4, 5, 6, 7))
    assert all(isinstance(each["rank"], int) and 1e-5 <= each["lr"] <= 1e-1 for each in found)
    whole = sweep(parameters={"rank": {"min": 1, "max": 40, "log": True}}, trials=40)
    assert sorted(each["rank"] for each in trials_of(whole)) == list(range(1, 41))


def test_the_trials_of_a_seed_never_change() -> None:
    """They are drawn anew at every look: other numbers in a later release would be other jobs of a running sweep."""
    parameters = {"lr": {"min": 1e-4, "max": 1e-2, "log": True}, "wd": {"values": [0.0, 0.1]}}
    assert [tuple(each.values()) for each in trials_of(sweep(parameters=parameters, trials=3, seed=7))] == [
        (0.000444289, 0.0),
        (0.00200387, 0.0),
        (0.00117968, 0.0),
    ]


# -- what is decided ---------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A stand-in for the database and the cluster: trials' rows, and jobs that train at the world's pace."""

    rules: SweepRules
    curves: list[list[float]]  # the metric of each trial after each step, from step 1 on
    rows: dict[int, SweepTrial] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # how far each job has come
    cancelled: set[int] = field(default_factory=set)
    submitted: list[int] = field(default_factory=list)
    most: int = 0

    def ended(self, number: int) -> bool:
        return number in self.cancelled or self.steps[number] >= len(self.curves[number - 1])

    def train(self, number: int, steps: int) -> None:
        if not self.ended(number):
            self.steps[number] = min(self.steps[number] + steps, len(self.curves[number - 1]))

    def observed(self) -> list[SweepTrial]:
        found = []
        for number, row in self.rows.items():
            seen = range(row.results.read_step + 1, self.steps[number] + 1)
            fresh = tuple(MetricValue(step=step, value=self.curves[number - 1][step - 1]) for step in seen)
            found.append(replace(row, live=not self.ended(number), fresh=fresh))
        return found

    def round(self, killed_after: int) -> SweepPhase:
        """One round of the controller, which is killed after so many of its writes."""
        decision = decide(self.rules, self.observed())
        writes = [("keep", 0), *(("stop", t.number) for t in decision.trials if t.live and t.stopped)]
        writes += [("start", number) for number in decision.starts]
        for what, number in writes[:killed_after]:
            if what == "keep":
                self.rows = {trial.number: trial for trial in decision.trials}
            elif what == "stop":
                self.cancelled.add(number)
            else:
                assert number not in self.rows, "a number never has two jobs"
                self.rows[number], self.steps[number] = SweepTrial(number, True), 0
                self.submitted.append(number)
            self.most = max(self.most, sum(not self.ended(each) for each in self.rows))
        return decision.phase


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_sweep_ends_with_the_best_whatever_is_killed_when(data: st.DataObject) -> None:
    count, better = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(["lower", "higher"]))
    rules = SweepRules(
        count, data.draw(st.integers(1, 4)), better, data.draw(st.sampled_from([None, Asha(min_steps=2)]))
    )
    values = st.lists(st.floats(-5, 5), min_size=1, max_size=12)
    world = World(rules, data.draw(st.lists(values, min_size=count, max_size=count)))
    chance, phase = random.Random(data.draw(st.integers(0, 2**32))), SweepPhase.RUNNING
    for _ in range(20):
        for number in list(world.rows):
            world.train(number, chance.randint(0, 3))
        phase = world.round(killed_after=chance.randint(0, 4))
    while not phase.terminal:
        for number in list(world.rows):
            world.train(number, 1)
        phase = world.round(killed_after=1_000)
    assert world.submitted == list(range(1, count + 1)), "each trial once, in order"
    assert world.most <= rules.concurrency
    assert phase == SweepPhase.SUCCEEDED
    seen = {n: world.curves[n - 1][: world.steps[n]] for n in world.rows}
    best = (min if better == "lower" else max)(value for curve in seen.values() for value in curve)
    found = best_of(better, list(world.rows.values()))
    assert found is not None
    assert found.results.best is not None
    assert found.results.best.value == best
    for number, row in world.rows.items():
        assert number not in world.cancelled or row.stopped is not None
        assert row.stopped is not None or world.steps[number] == len(world.curves[number - 1]), "it came to its end"
        # Who came to its end before it was judged is told its place at every rung, and can't be stopped any more.
        judged_on = row.stopped is None or all(rung.goes_on for rung in row.results.rungs[:-1])
        assert judged_on, "who is stopped is not judged again"


def plain_asha(arrivals: list[tuple[int, float]], factor: int, better: Better) -> list[bool]:
    """The rule in plain words: sort what has come to the rung, and keep the best n/factor, but at least one."""
    verdicts = []
    for index, (_, value) in enumerate(arrivals):
        ranked = sorted((each for _, each in arrivals[: index + 1]), reverse=better == "higher")
        cut = ranked[max(1, len(ranked) // factor) - 1]
        verdicts.append(value <= cut if better == "lower" else value >= cut)
    return verdicts


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(-3, 3)), max_size=30),
    st.integers(2, 5),
    st.sampled_from(["lower", "higher"]),
)
def test_asha_is_the_rule_in_plain_words(arrivals: list[tuple[int, float]], factor: int, better: Better) -> None:
    asha, come, verdicts = Asha(min_steps=10, factor=factor), [], []
    for _, value in arrivals:
        verdicts.append(judged(asha, better, MetricValue(step=10, value=value), come).goes_on)
        come.append(value)
    assert verdicts == plain_asha(arrivals, factor, better)


def test_rungs_are_powers_of_the_factor() -> None:
    assert [step for step in range(1, 400) if is_rung(Asha(min_steps=5, factor=3), step)] == [5, 15, 45, 135]


def test_a_loser_is_told_its_place_and_an_ended_trial_is_not_stopped() -> None:
    rules = SweepRules(3, 3, "lower", Asha(min_steps=2, factor=3))
    at = (MetricValue(step=2, value=1.0),), (MetricValue(step=2, value=3.0),), (MetricValue(step=2, value=2.0),)
    trials = [SweepTrial(1, True, fresh=at[0]), SweepTrial(2, True, fresh=at[1]), SweepTrial(3, False, fresh=at[2])]
    decision = decide(rules, trials)
    assert [trial.stopped for trial in decision.trials] == [None, "place 2 of 2 at step 2; 1 went on", None]
    again = decide(rules, decision.trials)
    assert (again.trials, again.starts) == (decision.trials, ()), "nothing is judged twice"


def test_a_sweep_without_a_value_has_failed_and_a_cancelled_one_waits_for_its_trials() -> None:
    rules = SweepRules(2, 1, "lower")
    assert decide(rules, [SweepTrial(1, False), SweepTrial(2, False)]).phase == SweepPhase.FAILED
    good = TrialResults(best=MetricValue(step=1, value=1.0))
    assert decide(rules, [SweepTrial(1, False, good), SweepTrial(2, False)]).phase == SweepPhase.SUCCEEDED
    assert (decide(rules, [SweepTrial(1, False)]).starts, decide(rules, [SweepTrial(1, True)]).starts) == ((2,), ())
    assert decide(rules, [SweepTrial(1, True)], cancelled=True).phase == SweepPhase.STOPPING
    ended = decide(rules, [SweepTrial(1, False)], cancelled=True)
    assert (ended.phase, ended.starts) == (SweepPhase.CANCELLED, ())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_the_example_is_a_valid_sweep() -> None:
    checked = parse_document(Document(yaml.safe_load(EXAMPLE.read_text())))
    assert [each.name for each in checked.submissions] == [f"sweep-stdlib-{number}" for number in range(1, 13)]
    assert len({each.spec.training.optimizer.lr for each in checked.submissions}) == 12
    labels = checked.submissions[2].labels
    assert (labels["muster.dev/sweep"], labels["muster.dev/trial"]) == (checked.draft.id, "3")


LR = "training.optimizer.lr"
AT = f"sweep.parameters.{LR}"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"parameters": {}}, "sweep.parameters", "must have at least 1 item"),
    (
        {"parameters": {"training.optimizer.lrr": {"values": [1.0]}}, "trials": 1},
        "sweep.parameters.training.optimizer.lrr",
        "is no field of the job's spec. Did you mean 'training.optimizer.lr'?",
    ),
    (
        {"parameters": {"training.optimiser.lr": {"values": [1.0]}}, "trials": 1},
        "sweep.parameters.training.optimiser.lr",
        "is no field of the job's spec. Did you mean 'training.optimizer.lr'?",
    ),
    (
        {"parameters": {"training.data.train[3].weight": {"values": [1.0]}}, "trials": 1},
        "sweep.parameters.training.data.train[3].weight",
        "the list has 1 items in this job's spec, and no [3]",
    ),
    ({"parameters": {"no path!": {"values": [1]}}}, "sweep.parameters.no path!", "is no path of the job's spec"),
    ({"parameters": {LR: {"values": [0.1, -1.0]}}, "search": "grid"}, AT, "trial 2 (lr -1.0): must be greater than 0"),
    ({"parameters": {LR: {"values": []}}}, f"{AT}.values", "must have at least 1 item, not 0"),
    ({"parameters": {LR: {"values": [1.0, 1.0]}}}, AT, "one of them is given twice"),
    ({"parameters": {LR: {}}}, AT, "give either values, or min and max"),
    ({"parameters": {LR: {"min": 1.0}}}, AT, "a range has two ends: give min and max"),
    ({"parameters": {LR: {"min": 0.1, "max": 0.1}}}, AT, "min 0.1 must be less than max 0.1"),
    ({"parameters": {LR: {"min": 0, "max": 1, "log": True}}}, AT, "log needs a min above 0, not 0"),
    ({"parameters": {LR: {"values": [1.0], "log": True}}}, AT, "log is for min and max"),
    (
        {"parameters": {LR: {"min": 0.1, "max": 1.0}, "training.optimizer": {"values": [{}]}}},
        AT,
        "lies within training.optimizer, which is a parameter itself",
    ),
    (
        {"parameters": {"training.evaluation.every": {"values": [5]}}},
        "sweep.parameters.training.evaluation.every",
        "is what trials are compared by",
    ),
    (
        {"parameters": {"runtime.env[0].value": {"values": ["x"]}}},
        "sweep.parameters.runtime.env[0].value",
        "may hold secrets",
    ),
    ({"trials": 1_001}, "sweep.trials", "must be at most 1,000, not 1001"),
    ({"trials": None}, "sweep.trials", "is required: a random search makes so many jobs"),
    (
        {"parameters": {LR: {"values": [0.1, 0.2]}}, "trials": 3},
        "sweep.trials",
        "there are only 2 different combinations",
    ),
    ({"search": "grid", "trials": 3, "parameters": {LR: {"values": [0.1]}}}, "sweep.trials", "leave trials out"),
    ({"search": "grid", "trials": None}, AT, "a grid needs values"),
    (
        {
            "search": "grid",
            "trials": None,
            "parameters": {LR: {"values": [n + 1.0 for n in range(1_000)]}, "training.seed": {"values": [1, 2]}},
        },
        "sweep.parameters",
        "a grid of 2,000 combinations is more than 1,000 trials",
    ),
    (
        {"metric": {"name": "accuracy"}},
        "sweep.metric.name",
        "evaluation.metric 'accuracy' is not reported; there will be loss",
    ),
    ({"metric": {"name": "loss", "better": "higher"}}, "sweep.metric.name", "of loss the lower is better"),
    (
        {"stopping": {"kind": "asha", "minSteps": 60}},
        "sweep.stopping.minSteps",
        "must be a multiple of training.evaluation.every (50)",
    ),
    (
        {"stopping": {"kind": "asha", "minSteps": 200}},
        "sweep.stopping.minSteps",
        "must be less than the steps of a trial (200)",
    ),
    ({"stopping": {"kind": "median", "minSteps": 50}}, "sweep.stopping.kind", "must be 'asha'"),
    ({"concurrency": 0}, "sweep.concurrency", "must be greater than 0"),
    ({"paramters": {}}, "sweep.paramters", "unknown key. Did you mean 'parameters'?"),
]


@pytest.mark.parametrize(("changes", "path", "words"), REFUSED)
def test_each_fault_has_its_place_and_words(changes: dict[str, Any], path: str, words: str) -> None:
    document = copy.deepcopy(EXAMPLE_SWEEP)
    document["sweep"] = {"parameters": {LR: {"min": 1e-4, "max": 1e-2}}, "trials": 8, **changes}
    if document["sweep"].get("search") == "grid" and "trials" not in changes:
        document["sweep"]["trials"] = None
    document["sweep"] = {key: value for key, value in document["sweep"].items() if value is not None}
    with pytest.raises(ApiError) as refused:
        parse_document(Document(document))
    assert refused.value.code == "invalid_sweep"
    told = [(fault.path, str(fault).partition(": ")[2]) for fault in refused.value.errors]
    assert any(place == path and words in said for place, said in told), told


def test_a_fault_of_the_job_itself_names_no_trial() -> None:
    document = copy.deepcopy(EXAMPLE_SWEEP)
    document["spec"]["training"]["batch"]["microBatch"] = 0
    with pytest.raises(ApiError) as refused:
        parse_document(Document(document))
    assert [str(fault) for fault in refused.value.errors] == [
        "spec.training.batch.microBatch: must be greater than 0, not 0"
    ]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"metadata": {"name": "a" * 44}}, "metadata.name"),
        ({"metadata": {}}, "metadata.name"),
        ({"sweep": None}, "sweep"),
    ],
)
def test_a_document_without_its_parts_is_refused(change: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_document(Document({**EXAMPLE_SWEEP, **change}))
    assert [fault.path for fault in refused.value.errors] == [path]


def test_a_job_that_is_not_evaluated_can_not_be_compared() -> None:
    document = copy.deepcopy(EXAMPLE_SWEEP)
    del document["spec"]["training"]["evaluation"]
    with pytest.raises(ApiError, match=r"spec\.training\.evaluation: is required: a sweep compares trials"):
        parse_document(Document(document))


def test_a_secret_in_the_environment_is_told_in_no_fault() -> None:
    document = copy.deepcopy(EXAMPLE_SWEEP)
    document["spec"]["runtime"] = {"env": [{"name": "HF_TOKEN", "value": "hf_verysecret", "nope": 1}]}
    with pytest.raises(ApiError) as refused:
        parse_document(Document(document))
    assert "hf_verysecret" not in str(refused.value) + "".join(map(str, refused.value.errors))
