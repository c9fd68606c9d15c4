"""A short run of `make sim` and `make sim-mutants`, in every test run."""

from __future__ import annotations

import multiprocessing
import random

import pytest

from muster.operator.core.observed import WorkerState
from tests.sim import mutants
from tests.sim.faults import draw, heal
from tests.sim.people import settle_nodes, submit
from tests.sim.physics import Process, Training, seen_worker
from tests.sim.run import kept_seeds, tell
from tests.sim.swarm import run_seed
from tests.sim.world import SimWorld

SEEDS = 120
# Mistakes of each kind that come to light within a few worlds; `make sim-mutants` plants them all.
QUICK = (
    "terminal before cleanup",
    "absence is believed from a cached read",
    "signals of any attempt count",
    "workers newer than the status are swept",
    "an attempt resumes where the last one did",
    "the reservations drop a gang that restarts",
    "held nodes count as free",
    "a person's GPUs are not limited",
    "a failure is charged twice",
    "goodput books more than there was",
    "a paused restart is never resumed",
)


@pytest.mark.parametrize("seed", kept_seeds())
def test_what_failed_once_does_not_fail_again(seed: int) -> None:
    result = run_seed(seed)
    assert not result.failure, tell(result)


def test_no_promise_breaks_in_any_of_many_worlds() -> None:
    attempts = ended = 0
    for seed in range(SEEDS):
        result = run_seed(seed)
        assert not result.failure, tell(result)
        attempts += result.counts["attempts"]
        ended += result.counts["Succeeded"]
    assert attempts > SEEDS, "there was little to break"
    assert ended > SEEDS / 2, "hardly anything got done"


def test_a_node_that_is_back_is_heard_of_at_once_however_long_it_was_to_be_cut_off() -> None:
    """Otherwise the operator rightly calls its healthy gang hung, after 90 s of a silence that is not there."""
    world = SimWorld(random.Random(1), heal(draw(random.Random(1))), False)
    settle_nodes(world)
    job = submit(world, "job0")
    node = next(iter(world.nodes.values()))
    world.run_until(1.0)
    process = Process(job.uid, 1, 0, node.name, 1, 0, world.t, WorkerState.RUNNING, alive=True, joined=True)
    job.processes[process.id] = process
    process.held = (40.0, 60.0)
    job.trainings[1] = Training(job.uid, 1, (process,), world.t, 1.0, 0, 1000, 1.0)

    world.partition(node, 300.0)
    world.run_until(50.0)
    (cut_off,) = seen_worker(job, process, world.t, 0.0).heartbeats
    world.node_up(node)  # long before its 300 s are over
    (heard,) = seen_worker(job, process, world.t, 0.0).heartbeats

    assert (cut_off.at, cut_off.stopped) == (1.0, False)
    assert (heard.at, heard.stopped) == (50.0, True)


def test_a_world_is_the_same_each_time() -> None:
    first, second = run_seed(3, trace=True), run_seed(3, trace=True)
    assert first == second
    assert len(first.history) > 50


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_mistake_is_found(name: str) -> None:
    """In a process of its own: what is planted must not outlive it."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        _, seeds, promise = pool.apply(mutants._hunt_by_name, ((name, 60),))
    assert seeds, f"{name} got away with it in 60 worlds"
    assert promise


def test_every_mutant_still_changes_something() -> None:
    assert len(mutants.MUTANTS) >= 15
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    assert set(QUICK) <= {mutant.name for mutant in mutants.MUTANTS}
