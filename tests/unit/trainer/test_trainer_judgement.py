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
from pydantic.alias_generators import to_camel
from tests.polling import eventually
from torch import nn

from muster.local.processes import is_stopped
from muster.storage.small_files import write_whole
from muster.trainer.errors import NumericError
from muster.trainer.launch.stack_dumps import DUMP_SIGNAL, STACKS, dump
from muster.trainer.launch.verdict import hung_ranks
from muster.trainer.train import straggler_timer
from muster.trainer.train.deadlines import PhaseDeadlines
from muster.trainer.train.numeric_guard import (
    DIVERGED_STEPS,
    FIRST_STEPS,
    KNOWN_MIN,
    REMEMBERED,
    SKIPPED_IN_A_ROW_MAX,
    NumericGuard,
)
from muster.trainer.train.progress import JobProgress
from muster.trainer.train.rank_state import RankState
from muster.trainer.train.straggler_timer import StragglerDetector, StragglerTimer
from muster.words.checkpoint import DataCursor, NumericGuardState
from muster.words.names import HEARTBEAT
from muster.words.signals import Heartbeat, TrainerPhase

# --- deadlines ---


def test_a_deadline_is_learnt_from_the_run() -> None:
    deadlines = PhaseDeadlines()
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


def usual(guard: NumericGuard, seed: int = 1, steps: int = KNOWN_MIN, noise: float = 0.05) -> None:
    """A run that has come from a loss of 5 to 2.5."""
    rng = random.Random(seed)
    for step in range(FIRST_STEPS):
        assert guard.judge(5.0, 1.0, step) == ""
    for step in range(steps + REMEMBERED):
        assert guard.judge(2.5 + rng.gauss(0.0, noise), math.exp(rng.gauss(0.0, 0.2)), step) == ""


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [
        (math.nan, 1.0, "the loss is nan"),
        (math.inf, math.nan, "the loss is inf"),
        (2.5, math.nan, "the gradient norm is nan (loss 2.5000)"),
    ],
)
def test_a_bad_batch_is_skipped_and_a_good_one_forgives(loss: float, norm: float, why: str) -> None:
    guard = NumericGuard()
    usual(guard)
    for _ in range(3):
        for _ in range(SKIPPED_IN_A_ROW_MAX):
            assert guard.judge(loss, norm, 70).startswith(why)
            assert guard.doubtful
        assert guard.judge(2.5, 1.0, 71) == ""
        assert not guard.doubtful
    for _ in range(SKIPPED_IN_A_ROW_MAX):
        guard.judge(loss, norm, 80)
    with pytest.raises(NumericError, match="it is not the batch"):
        guard.judge(loss, norm, 81)
    assert guard.last_loss() == 2.5


@pytest.mark.parametrize("hard_share", [0.06, 0.3])
def test_rare_hard_batches_are_learnt_from(hard_share: float) -> None:
    """Easy data have a loss and a gradient of nearly nothing, hard ones of the job's beginning, for good."""
    for seed in range(5):
        rng, guard = random.Random(seed), NumericGuard(clip_norm=1.0)
        for step in range(2_000):
            hard = rng.random() < hard_share
            loss, norm = (5.0, 3.0) if hard else (5.0 * math.exp(-step / 20) + 1e-3, 1e-2)
            assert guard.judge(loss * math.exp(rng.gauss(0.0, 0.1)), norm, step) == ""
        assert guard.skipped == 0


def test_a_batch_that_is_gone_over_several_times_is_skipped_once_and_only_where_no_pass_was_learnt_from() -> None:
    """As task grpo does, with `iterations`."""
    guard = NumericGuard()
    passes = [(2, [math.nan, math.nan]), (3, [math.nan, 2.0]), (4, [2.0, math.nan]), (5, [2.0, math.nan, 2.0])]
    for step, losses in passes:
        for loss in losses:
            guard.judge(loss, 1.0, step)
    assert guard.skipped == 1


def test_some_hard_batches_in_a_row_end_nothing() -> None:
    """As two runs on one text file met at step 1664: four batches in a row with 0.86, where 0.487 ± 0.025 was usual."""
    rng, guard = random.Random(1), NumericGuard(clip_norm=1.0)
    for step in range(1_664):
        guard.judge(0.487 + 5.0 * math.exp(-step / 100) + rng.gauss(0.0, 0.025), 0.5, step)
    for step in range(1_664, 1_664 + DIVERGED_STEPS - 1):
        assert guard.judge(6.0, 2.0, step) == ""
        assert guard.doubtful, "a checkpoint waits until it is seen what becomes of it"
    assert guard.judge(0.5, 0.5, 1_700) == ""
    assert not guard.doubtful


def test_a_model_that_has_diverged_ends_the_attempt() -> None:
    guard = NumericGuard(clip_norm=1.0)
    usual(guard)
    for step in range(DIVERGED_STEPS - 1):
        assert guard.judge(7.5, 0.2, 300 + step) == ""
    with pytest.raises(NumericError, match=r"has diverged: at step 331 the loss is 7\.5000, and for 32 steps"):
        guard.judge(7.5, 0.2, 331)


@pytest.mark.parametrize("after", [2.7, 3.6])
def test_a_level_that_keeps_half_of_what_was_learnt_is_no_divergence(after: float) -> None:
    guard = NumericGuard(clip_norm=1.0)
    usual(guard)
    for step in range(1_000):
        assert guard.judge(after, 1.0, step) == ""


@pytest.mark.parametrize("seed", range(5))
def test_a_long_easy_document_makes_no_divergence_of_the_text_after_it(seed: int) -> None:
    """Small steps read a file of tables for longer than the guard remembers single losses; then prose comes again."""
    guard, rng = NumericGuard(), random.Random(seed)
    stretches = [(5.0, 8), (3.9, 600), (0.86, 400), (3.8, 600), (0.5, 900), (3.9, 300)]
    for level, steps in stretches:
        for step in range(steps):
            assert guard.judge(level * math.exp(rng.gauss(0.0, 0.1)), 1.0, step) == ""
    for step in range(DIVERGED_STEPS - 1):
        guard.judge(7.5, 1.0, step)
    with pytest.raises(NumericError, match="has diverged"):
        guard.judge(7.5, 1.0, 3_000)


def test_losses_that_do_not_compare_show_no_divergence() -> None:
    guard = NumericGuard(losses_compare=False)
    usual(guard)
    for step in range(1_000):
        assert guard.judge(7.5, 1.0, step) == ""
    assert not guard.doubtful


def test_a_gradient_s_spike_is_skipped_only_where_that_is_asked_for() -> None:
    plain, asked, clipped = NumericGuard(), NumericGuard(skip_spikes=True), NumericGuard(1.0, skip_spikes=True)
    for guard in (plain, asked, clipped):
        usual(guard)
    assert plain.judge(9.0, 1e6, 300) == ""
    assert clipped.judge(9.0, 1e6, 300) == "", "its step is no longer than the usual ones"
    for _ in range(SKIPPED_IN_A_ROW_MAX):
        assert asked.judge(9.0, 1e6, 300 + asked.skipped).startswith("the gradient norm is 1e+06, where ")
    assert asked.judge(9.0, 1e6, 310) == "", "no kind of data is left out for good"
    assert asked.skipped == SKIPPED_IN_A_ROW_MAX
    assert not NumericGuard(skip_spikes=True).judge(2.0, 1.0, 1)


def test_noise_and_progress_are_no_faults() -> None:
    for seed in range(5):
        rng, guard = random.Random(seed), NumericGuard(skip_spikes=True)
        for step in range(1_000):
            level = 2.0 + 6.0 * math.exp(-step / 300)
            assert guard.judge(level * math.exp(rng.gauss(0.0, 0.2)), math.exp(rng.gauss(0.0, 0.3)), step) == ""


def test_a_resumed_run_judges_as_an_uninterrupted_one() -> None:
    whole, resumed = NumericGuard(skip_spikes=True), NumericGuard(skip_spikes=True)
    usual(whole)
    whole.judge(math.nan, 1.0, 300)
    whole.judge(9.0, 1e6, 301)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed.state() == whole.state()
    assert resumed.judge(9.0, 1e6, 302) == whole.judge(9.0, 1e6, 302) != ""
    NumericGuard().restore({})


def test_the_last_line_counts_what_was_not_learnt_from() -> None:
    """Those of skipped steps, and what a later attempt passed over: a job is not done as if it had used all."""
    progress = JobProgress(steps=9, cursor=DataCursor(seed=0, epoch=0, sample=72), step=9)
    assert progress.last_line(0) == "done after step 9"
    progress.skipped_data.append({"epoch": 0, "sample": 16, "samples": 24})
    assert progress.last_line(8) == "done after step 9; 32 samples skipped, not learnt from"


# --- stragglers ---


def found_after(ranks: int, slow: dict[int, float], noise: float, seed: int, onset: int = 30) -> int | None:
    """Steps from the onset until exactly the slow ranks are found; None within 60."""
    rng, stragglers = random.Random(seed), StragglerDetector(ranks)
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
        rng, stragglers = random.Random(seed), StragglerDetector(2)
        for step in range(2_000):
            stragglers.hear(step, [math.exp(rng.gauss(0.0, 0.25)) for _ in range(2)])
            assert stragglers.slow == (), (seed, step)


def test_a_hiccup_of_a_rank_makes_no_straggler_and_one_that_recovers_is_none_any_more() -> None:
    stragglers = StragglerDetector(4)
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
    stragglers = StragglerDetector(2)
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
from muster.words.signals import TrainerPhase
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


def test_a_commit_is_checked_for_all_that_the_guard_remembers() -> None:
    known = {to_camel(name) for name in NumericGuardState.model_fields}
    assert NumericGuard().state().keys() == known
