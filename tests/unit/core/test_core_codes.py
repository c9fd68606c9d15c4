"""Every code is reached by a decision of the production core, and says why in words."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.core.seen import (
    NOW,
    beat,
    crew,
    exited,
    gone,
    granted,
    node,
    observed,
    running,
    settled,
    spec,
    starting,
    summary,
    with_status,
    worker,
    write,
)
from tests.unit.core.test_core_admit import entry, fleet, four, holding
from tests.unit.core.test_core_rejections import QUOTA, rejected
from tests.unit.core.test_core_signals import signal
from tests.unit.core.test_core_stalls import gang

from muster.operator.core.admit import admit
from muster.operator.core.audit import audit
from muster.operator.core.codes import OF_CAUSE, Code, code_of
from muster.operator.core.decide import decide
from muster.operator.core.decision import JobDecision
from muster.operator.core.observed import ObservedJob, Rejection
from muster.words.quotas import ProjectQuota, Quota
from muster.words.signals import Cause, Signal, SignalKind, TrainerPhase
from muster.words.status import Phase


def follow(seen: ObservedJob, obedient: bool = True) -> list[JobDecision]:
    """Decisions until nothing changes; the gang is gone as soon as it is told."""
    decisions = []
    for _ in range(20):
        decision = decide(seen)
        assert audit(seen, decision) == ()
        decisions.append(decision)
        if decision.status != seen.status:
            seen = write(seen, decision)
        elif decision.actions and obedient and seen.workers:
            seen = gone(seen)
        else:
            break
    return decisions


def ends(code: int, **changes: object) -> list[JobDecision]:
    seen = running()
    return follow(with_status(seen, seen.status, workers=(exited(0, code, **changes), crew()[1])))  # type: ignore[arg-type]


def asked(**updates: object) -> list[JobDecision]:
    seen = running()
    deleting = bool(updates.pop("deleting", False))
    return follow(replace(seen, deleting=deleting, spec=seen.spec.model_copy(update=updates)))


def failing_again(seen: ObservedJob) -> ObservedJob:
    """The attempt ends with an exception after step 5; the state in which the next one has begun to train, if any."""
    end = exited(0, 1, attempt=seen.status.attempt, message="KeyError: 'no such sample'")
    end = replace(end, exit=end.exit and end.exit.model_copy(update={"step": 5}))
    seen = replace(seen, workers=(end, crew(seen.status.attempt)[1]))
    for decision in follow(seen):
        seen = write(seen, decision)
    if seen.status.phase is not Phase.STARTING:
        return seen
    return settled(replace(seen, workers=crew(seen.status.attempt)))


def everything() -> list[JobDecision]:
    seen = running()
    half = with_status(starting(), starting().status, workers=(worker(0),))
    older = with_status(starting(), starting().status, workers=(worker(0, attempt=0),))
    meeting = with_status(starting(), starting().status, workers=(worker(0), worker(1)))
    down = with_status(starting(), starting().status, workers=(worker(0), worker(1, state="starting")))
    loop = running(spec=spec(recovery={"stopAfterNoProgress": 1}))
    late = replace(running(spec=spec(activeDeadlineSeconds=1)), now=NOW + 60, workers=crew(now=NOW + 60))
    offer = replace(seen, reservations=(entry("uid-1", "a", "b"), entry("uid-1", "a", "b", "c", number=1)))
    drained = (Signal(kind=SignalKind.NODE_DRAIN, attempt=1, at=NOW, node="b"),)
    newer = with_status(seen, seen.status.model_copy(update={"schema_version": 9}))
    loading = with_status(meeting, meeting.status, workers=crew(step=0))
    done = with_status(seen, seen.status, workers=(exited(0, 0), exited(1, 0)))
    hung = write(gang(NOW + 1_000.0, {"idle": 16.0}, {"idle": 16.0}))
    cases = [
        follow(case)
        for case in (
            seen,
            half,
            older,
            meeting,
            down,
            late,
            offer,
            newer,
            loading,
            done,
            hung,
            observed(),
            starting(),
        )
    ]
    cases += [
        follow(replace(seen, signals=drained)),
        follow(replace(seen, signals=(signal(SignalKind.SPOT_NOTICE, 1, "a"),))),
    ]
    cases += [follow(with_status(loop, loop.status, workers=(exited(0, 137), crew()[1])))]
    cases += [follow(replace(gang(NOW + 1_010.0, {"idle": 26.0}, {"idle": 26.0}), status=hung.status))]
    closed = (done.status.attempts[0].model_copy(update={"ended_at": NOW}),)  # so an earlier Muster wrote it
    ending = {"phase": Phase.STOPPING, "code": "Finishing", "ends_as": Phase.SUCCEEDED, "attempts": closed}
    cases += [follow(with_status(done, done.status.model_copy(update=ending)))]
    dry = running(spec=spec(recovery={"dryRun": True}))
    cases += [follow(replace(dry, signals=(signal(SignalKind.GPU_FAULT, 1, "a"),)))]
    cases += [follow(failing_again(failing_again(running(spec=spec(recovery={"backoffSeconds": 0})))))]
    generous = spec(recovery={"budgets": dict.fromkeys(("user_error", "out_of_memory", "numeric"), 5)})
    for code in (80, 81, 82, 83, 84, 1):
        failing = running(spec=generous)
        cases.append(follow(with_status(failing, failing.status, workers=(exited(0, code), crew()[1]))))
    cases.append(follow(observed(reservations=(granted(),), commits_unreadable="s3://ckpt does not answer")))
    cases.append(follow(rejected(Rejection.TEMPORARY, QUOTA, after=20.0)))
    cases += [ends(80), asked(suspend=True), asked(cancel=True), asked(deleting=True)]
    preparing = starting()

    loaders = tuple(worker(i, heartbeats=(beat(1, 0, phase=TrainerPhase.LOAD, rank=i),)) for i in range(2))
    cases.append(follow(with_status(preparing, preparing.status, workers=loaders)))
    return [decision for case in cases for decision in case]


def waits() -> dict[str, str]:
    rack = {"topology": {"required": "rack"}}
    big = summary("big", spec(gang={"nodes": 4, "gpusPerNode": 8}), age=1000)
    jobs = [
        holding("there", "a", "b"),
        big,
        summary("small", spec(gang={"nodes": 1, "gpusPerNode": 8})),
        summary("huge", spec(gang={"nodes": 9, "gpusPerNode": 8})),
        summary("rack", spec(gang={"nodes": 2, "gpusPerNode": 8} | rack)),
        holding("rich", "e", namespace="poor"),
        summary("poor", spec(gang={"nodes": 1, "gpusPerNode": 8}), namespace="poor"),
        summary("poorer", namespace="poor"),
        holding("tts", "f", project="nlp", owner="ada"),
        summary("mine", spec(gang={"nodes": 1, "gpusPerNode": 8}), project="nlp", owner="ada"),
        summary("bens", spec(gang={"nodes": 2, "gpusPerNode": 8}), project="nlp", owner="ben"),
        summary("dense", spec(gang={"nodes": 1, "gpusPerNode": 80})),
        summary("spent", project="cv"),
        summary("kueue", spec(gang={"nodes": 2, "gpusPerNode": 8, "scheduler": {"kind": "kueue"}})),
    ]
    quotas = {"nlp": ProjectQuota(gpus=16, person=Quota(gangs=1)), "cv": ProjectQuota(gpu_hours_per_month=0)}
    held = (entry("there", "a", "b"), entry("rich", "e"), entry("tts", "f"))
    plan = admit(fleet([*four(), node("e"), node("f")], jobs, limits={"poor": 8}, quotas=quotas), held)
    urgent = summary("urgent", spec(priority=1, gang={"nodes": 2, "gpusPerNode": 8}))
    may = {"default": ProjectQuota(preempts=True)}
    preempting = admit(fleet([node("a"), node("b")], [holding("there", "a", "b"), urgent], quotas=may), held[:1])
    return {wait.code: wait.because for each in (plan, preempting) for wait in each.waits.values()}


def test_every_code_is_reached_and_every_reason_is_in_words() -> None:
    reached = {decision.code: decision.because for decision in everything()}
    reached |= {decision.status.code: decision.status.because for decision in everything()}
    reached |= waits()
    reached[Code.CREATED] = observed().status.because
    assert set(Code) - reached.keys() == set()
    assert reached.keys() <= set(Code)
    for code, because in reached.items():
        assert len(because.split()) >= 3, f"{code} explains nothing: {because!r}"


def test_every_wait_names_what_is_needed_and_what_is_there() -> None:
    for code, because in waits().items():
        assert code == Code.AWAITING_SCHEDULER or any(character.isdigit() for character in because), because


def test_every_cause_has_a_code_and_an_unknown_code_stops_nobody() -> None:
    assert OF_CAUSE.keys() == set(Cause)
    assert code_of("SomethingOfTomorrow") is Code.UNKNOWN_FAULT


def test_a_cancellation_says_who_asked_for_it() -> None:
    assert asked(cancel=True)[-1].status.because == "the user cancelled the job"
    why = "stopped by sweep rates: place 4 of 5 at step 200; 2 went on"
    assert asked(cancel=True, cancel_reason=why)[-1].status.because == why
