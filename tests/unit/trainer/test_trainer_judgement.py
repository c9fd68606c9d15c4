"""What a rank makes of its own run: how long a phase may take, which batches are bad, who is slow, where it stands."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.polling import eventually
from torch import nn

from muster.contract.names import HEARTBEAT
from muster.contract.signals import Heartbeat, TrainerPhase
from muster.local.processes import is_stopped
from muster.storage.small_files import write_whole
from muster.trainer.errors import NumericError
from muster.trainer.launch.stack_dumps import DUMP_SIGNAL, STACKS, dump
from muster.trainer.launch.verdict import hung_ranks
from muster.trainer.train import straggler_timer
from muster.trainer.train.deadlines import Deadlines
from muster.trainer.train.loss_spike_guard import KNOWN_MIN, SKIPPED_IN_A_ROW_MAX, LossSpikeGuard
from muster.trainer.train.rank_state import RankState
from muster.trainer.train.straggler_timer import Stragglers, StragglerTimer

# --- deadlines ---


def test_a_deadline_is_learnt_from_the_run() -> None:
    deadlines = Deadlines()
    for seconds in (90.0, 2.0):
        deadlines.took(TrainerPhase.STEP, seconds)
    assert deadlines.limit(TrainerPhase.STEP) is None, "the first steps compile"
    for _ in range(30):
        deadlines.took(TrainerPhase.STEP, 2.0)
    assert deadlines.limit(TrainerPhase.STEP) == 20.0, "one slow step is an accident"
    for _ in range(64):
        deadlines.took(TrainerPhase.STEP, 0.01)
    assert deadlines.limit(TrainerPhase.STEP) == 15.0
    deadlines.expect_compilation()
    assert deadlines.limit(TrainerPhase.STEP) == 120.0
    deadlines.took(TrainerPhase.EVALUATION, 30.0)
    assert deadlines.limit(TrainerPhase.EVALUATION) == 300.0
    assert deadlines.limit(TrainerPhase.CHECKPOINT) is deadlines.limit(TrainerPhase.LOAD) is None


# --- numbers ---


def usual(guard: LossSpikeGuard, seed: int = 1, steps: int = KNOWN_MIN, noise: float = 0.05) -> None:
    rng = random.Random(seed)
    for step in range(steps):
        assert guard.judge(2.5 + rng.gauss(0.0, noise), 1.0, step) == ""


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [
        (math.nan, 1.0, "the loss is nan"),
        (math.inf, math.nan, "the loss is inf"),
        (2.5, math.nan, "the gradient norm is nan (loss 2.5000)"),
        (9.0, 1.0, "the loss jumped to 9.0000 from 2.5"),
    ],
)
def test_a_bad_batch_is_skipped_and_a_good_one_forgives(loss: float, norm: float, why: str) -> None:
    guard = LossSpikeGuard()
    usual(guard)
    for _ in range(3):
        for _ in range(SKIPPED_IN_A_ROW_MAX):
            assert guard.judge(loss, norm, 70).startswith(why)
        assert guard.judge(2.5, 1.0, 71) == ""
    for _ in range(SKIPPED_IN_A_ROW_MAX):
        guard.judge(loss, norm, 80)
    with pytest.raises(NumericError, match="it is not the batch"):
        guard.judge(loss, norm, 81)
    assert guard.last_good_loss() == 2.5


def test_noise_and_progress_are_no_spikes() -> None:
    for seed in range(20):
        rng, guard = random.Random(seed), LossSpikeGuard()
        for step in range(3_000):
            level = 2.0 + 6.0 * math.exp(-step / 300)
            assert guard.judge(level * math.exp(rng.gauss(0.0, 0.2)), 1.0, step) == ""


def test_a_resumed_run_judges_as_an_uninterrupted_one() -> None:
    whole, resumed = LossSpikeGuard(), LossSpikeGuard()
    usual(whole)
    whole.judge(9.0, 1.0, 65)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed.state() == whole.state()
    assert resumed.judge(9.0, 1.0, 66) == whole.judge(9.0, 1.0, 66) != ""
    LossSpikeGuard().restore({})


# --- stragglers ---


def found_after(ranks: int, slow: dict[int, float], noise: float, seed: int, onset: int = 30) -> int | None:
    """Steps from the onset until exactly the slow ranks are found; None within 60."""
    rng, stragglers = random.Random(seed), Stragglers(ranks)
    for step in range(1, onset + 60):
        factors = [slow.get(rank, 1.0) if step >= onset else 1.0 for rank in range(ranks)]
        stragglers.hear(step, [factor * math.exp(rng.gauss(0.0, noise)) for factor in factors])
        if step < onset:
            assert stragglers.slow == ()
        elif {entry.rank for entry in stragglers.slow} == set(slow):
            return step - onset
    return None


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_straggler_is_found_within_ten_steps(ranks: int, noise: float) -> None:
    for seed in range(20):
        steps = found_after(ranks, {ranks - 1: 1.5}, noise, seed)
        assert steps is not None
        assert steps <= 8  # and one more, for the times are of the step before


def test_noise_makes_no_straggler() -> None:
    for seed in range(40):
        rng, stragglers = random.Random(seed), Stragglers(2)
        for step in range(2_000):
            stragglers.hear(step, [math.exp(rng.gauss(0.0, 0.25)) for _ in range(2)])
            assert stragglers.slow == (), (seed, step)


def test_a_hiccup_of_a_rank_makes_no_straggler_and_one_that_recovers_is_none_any_more() -> None:
    stragglers = Stragglers(4)
    for step in range(1, 200):
        slow = 3.0 if step % 5 == 0 else 1.6 if 100 <= step < 150 else 1.0
        stragglers.hear(step, [1.0, 1.01, slow, 0.99])
        if step < 100:
            assert stragglers.slow == ()
        if step == 110:
            (entry,) = stragglers.slow
            assert (entry.rank, 1.5 < entry.ratio < 1.7, 98 <= entry.since_step <= 102) == (2, True, True)
    assert stragglers.slow == ()


def test_a_step_of_which_not_all_is_known_counts_for_nothing() -> None:
    stragglers = Stragglers(2)
    for step in range(50):
        stragglers.hear(step, [0.0, 1.0])
    assert stragglers.slow == ()


def test_own_work_leaves_the_waits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP does it: a hook of the layer waits for weights before its forward pass. The clock is the test's."""
    now = [100.0]
    monkeypatch.setattr(straggler_timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += 0.02
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def gather(*_: object) -> None:
        now[0] += 0.3  # the peers' delay

    model = Model()
    for layer in model.layers:
        layer.register_forward_pre_hook(gather, prepend=True)
    timer = StragglerTimer(torch.device("cpu"), model, list(model.layers))
    with timer.working():
        now[0] += 0.01  # the work outside the layers
        model(torch.zeros(1))
    model(torch.zeros(1))  # a recomputation, or an evaluation
    assert timer.seconds() == pytest.approx(0.01 + 2 * 0.02)
    assert timer.seconds() == 0.0


# --- where a rank stands ---

STUCK = """
import sys, threading, time
from pathlib import Path
from muster.contract.signals import TrainerPhase
from muster.trainer.launch import stack_dumps
from muster.trainer.train import rank_state as state_module
state_module.STACK_REPORT_SHARE = 0.0
rank_state = state_module.RankState(Path(sys.argv[1]), 1, 0, time.time())
rank_state.heartbeats.start()
stack_dumps.answer_dumps(Path(sys.argv[1]), 0)
rank_state.activity.enter(TrainerPhase.STEP)
def the_collective():
    threading.Event().wait()
rank_state.activity.does("backward")
the_collective()
"""


def test_a_stuck_rank_tells_where_it_stands(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK.replace("Lock().acquire() or threading.", ""), str(tmp_path)]
    )
    try:
        path = tmp_path / HEARTBEAT.format(rank=0)

        def told() -> Heartbeat | None:
            beat = Heartbeat.model_validate_json(path.read_text()) if path.exists() else None
            return beat if beat and "the_collective" in beat.stands else None

        beat = eventually(told, "the rank to tell")
        assert (beat.doing, beat.moves) == ("backward", 1)
        assert not is_stopped(process.pid)
        dump(tmp_path, {0: process.pid})
        assert "the_collective" in (tmp_path / STACKS.format(rank=0)).read_text()
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(process.pid), "the process to be stopped")
        (rank,) = hung_ranks(tmp_path, since=0.0)
        assert (rank.rank, rank.stopped) == (0, True)
        assert rank.words.startswith("rank 0 is stopped in backward after step 0, ")
    finally:
        process.kill()
        process.wait()
    assert DUMP_SIGNAL not in (signal.SIGTERM, signal.SIGINT)


def beats(directory: Path, *ages: tuple[float, float]) -> None:
    """Heartbeats of ranks with a limit of 15 s: how old, and how long without progress when they were written."""
    now = time.time()
    for rank, (age, idle) in enumerate(ages):
        rank_state = RankState(directory, 1, rank, now)
        beat = rank_state.heartbeat().model_copy(
            update={
                "phase": TrainerPhase.STEP,
                "at": now - age,
                "progressed_at": now - age - idle,
                "limit_seconds": 15.0,
            }
        )
        write_whole(directory / HEARTBEAT.format(rank=rank), beat.model_dump_json(by_alias=True))


@pytest.mark.parametrize(
    ("ages", "hung"),
    [
        (((0.0, 6.0), (0.0, 7.0)), True),
        (((0.0, 4.0), (0.0, 7.0)), False),
        (((0.0, 20.0), (60.0, 20.0)), True),  # one of them does not even beat
        (((0.0, 20.0), (0.0, 1.0)), False),  # one moved just now
        (((60.0, 20.0), (60.0, 20.0)), False),  # nothing new is known of any: their disk has paused
        ((), False),
    ],
)
def test_ranks_hang_when_none_moves_that_can_be_heard(
    tmp_path: Path, ages: tuple[tuple[float, float], ...], hung: bool
) -> None:
    beats(tmp_path, *ages)
    assert len(hung_ranks(tmp_path, since=0.0)) == (len(ages) if hung else 0)
    assert hung_ranks(tmp_path, since=time.time() + 1) == []
