"""Total: whatever a status says, by accident or by somebody's hand, decide answers, and the job gets somewhere."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.seen import NOW, beat, committed, exited, granted, observed, running, spec, with_status, worker

from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.decision import RemoveWorker
from muster.operator.core.observed import ObservedJob, ObservedWorker, WorkerState, from_json, to_json
from muster.operator.replay import explain, main_replay
from muster.words.signals import Cause, Signal, SignalKind, TrainerPhase, WorkerExit
from muster.words.status import Attempt, Failure, GangStatus, GoodputAccount, JobStatus, Phase, Suspicion

NUMBERS = st.integers(-2, 5)
TIMES = st.sampled_from((-1e9, 0.0, NOW - 1000, NOW, NOW + 1000, 1e15))

GANG = st.builds(
    GangStatus,
    wanted=NUMBERS,
    ready=NUMBERS,
    nodes=st.lists(st.sampled_from("ab"), max_size=3).map(tuple),
    pool=st.none(),
    incarnations=st.lists(NUMBERS, max_size=3).map(tuple),
)
ATTEMPT = st.builds(
    Attempt,
    number=NUMBERS,
    created_at=TIMES,
    ended_at=st.none() | TIMES,
    resume_step=NUMBERS,
    last_step=st.none() | NUMBERS,
)
FAILURE = st.builds(
    Failure,
    cause=st.sampled_from(Cause),
    attempt=NUMBERS,
    at=TIMES,
    message=st.just("m"),
    node=st.none() | st.just("a"),
)
STATUS = st.builds(
    JobStatus,
    phase=st.sampled_from(Phase),
    code=st.sampled_from((*Code, "SomethingElse", "")),
    attempt=NUMBERS,
    gang=GANG,
    attempts=st.lists(ATTEMPT, max_size=2).map(tuple),
    last_failure=st.none() | FAILURE,
    reservation=NUMBERS,
    retry_at=st.none() | TIMES,
    since=TIMES,
    ends_as=st.none() | st.sampled_from(Phase),
    suspicion=st.none() | st.builds(Suspicion, at=TIMES),
    finished_at=st.none() | TIMES,
    ledger=st.builds(GoodputAccount, seconds=st.just({}), since=TIMES),
)
EXIT = st.builds(WorkerExit, exit_code=st.sampled_from((-1, 0, 1, 80, 85, 87, 137, 255)), at=TIMES)
BEAT = st.builds(lambda attempt, at, phase: beat(attempt, 3, at, phase), NUMBERS, TIMES, st.sampled_from(TrainerPhase))
WORKER = st.builds(
    ObservedWorker,
    worker=NUMBERS,
    attempt=NUMBERS,
    node=st.sampled_from("ab"),
    state=st.sampled_from(WorkerState),
    created_at=TIMES,
    exit=st.none() | EXIT,
    heartbeats=st.lists(BEAT, max_size=2).map(tuple),
    removing=st.booleans(),
    incarnation=st.integers(1, 3),
    reason=st.sampled_from(("", "OOMKilled", "WhateverElse")),
    since=TIMES,
)
SIGNAL = st.builds(
    Signal,
    kind=st.sampled_from(SignalKind),
    attempt=NUMBERS,
    at=TIMES,
    worker=st.none() | NUMBERS,
    incarnation=st.integers(1, 3),
    node=st.none() | st.just("a"),
)
SEEN = st.builds(
    lambda status, workers, signals, now, deleting, suspend, cancel, deadline, ttl: observed(
        status,
        now=now,
        workers=tuple(workers),
        signals=tuple(signals),
        deleting=deleting,
        spec=spec().model_copy(
            update={
                "suspend": suspend,
                "cancel": cancel,
                "active_deadline_seconds": deadline,
                "ttl_seconds_after_finished": ttl,
            }
        ),
    ),
    STATUS,
    st.lists(WORKER, max_size=4),
    st.lists(SIGNAL, max_size=2),
    TIMES,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.none() | st.just(60),
    st.none() | st.just(0),
)


@given(SEEN)
def test_decide_has_an_answer_to_everything(seen: ObservedJob) -> None:
    decision = decide(seen)
    assert decision.because
    assert decision.wake_after is None or decision.wake_after >= 0
    assert decision.status == seen.status or not decision.actions
    assert decide(seen) == decision


@given(SEEN)
def test_a_job_whose_workers_obey_comes_to_rest_whatever_its_status_said(seen: ObservedJob) -> None:
    """No combination of fields makes the operator spin, or wait for ever with nobody to wait for."""
    passes = 0
    while (after := _obeyed(seen)) is not None and passes < 60:
        seen, passes = after, passes + 1
    assert passes < 60, f"no rest: {seen.status.phase} {seen.status.code} {seen.status.because}"


def _obeyed(seen: ObservedJob) -> ObservedJob | None:
    """The state after one pass and workers that go when they are told; None if nothing changes any more."""
    decision = decide(seen)
    if decision.status != seen.status:
        return with_status(seen, decision.status)
    told = {a.id for a in decision.actions if isinstance(a, RemoveWorker)}
    left = tuple(w for w in seen.workers if w.id not in told)
    return replace(seen, workers=left) if left != seen.workers else None


def test_what_was_observed_survives_json() -> None:
    seen = running(committed=committed(4))
    seen = replace(
        seen,
        workers=(*seen.workers, exited(1, 137, attempt=0)),
        signals=(Signal(kind=SignalKind.ALERT, attempt=1, at=NOW),),
    )
    seen = replace(seen, reservations=(granted(),), nodes_unfit=("a",))
    assert to_json(from_json(to_json(seen))) == to_json(seen)


@given(SEEN)
def test_replay_explains_every_state(seen: ObservedJob) -> None:
    again = from_json(to_json(seen))
    lines = "\n".join(explain(again, decide(again), ()))
    assert "decision by rule" in lines


def test_replay_prints_the_decision_and_its_reasons(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    seen = running()
    seen = with_status(seen, seen.status, workers=(exited(0, 137, signal=9), worker(1)))
    path = tmp_path / "observed.json"
    path.write_bytes(to_json(replace(seen, fresh=False)))
    assert main_replay(str(path)) == 0
    told = capsys.readouterr().out
    for words in (
        "job team/job (uid-1), version 1, cached read",
        "status: Running (Training)",
        "worker 0 of attempt 1 on a: exited, exit code 137",
        "evidence: infrastructure (strength 1): worker 0 on a was ended by signal 9",
        "decision by rule `failed`: InfrastructureFault",
        "phase: 'Running' -> 'Restarting'",
    ):
        assert words in told


def test_replay_says_what_is_wrong_with_its_input(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert main_replay(str(tmp_path / "nothing.json")) == 2
    assert "name a file that `muster-operator dump` wrote" in capsys.readouterr().out
    (tmp_path / "bad.json").write_text('{"uid": 1}')
    assert main_replay(str(tmp_path / "bad.json")) == 2
    assert "is not an observed state" in capsys.readouterr().out
