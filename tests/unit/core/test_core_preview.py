"""What would become of a job that is not in the queue yet."""

from __future__ import annotations

from tests.unit.core.seen import NOW, summary
from tests.unit.core.test_core_admit import four
from tests.unit.core.test_core_preemption import gang, held, runs, seen, served, shared

from muster.operator.core.admit import admit
from muster.operator.core.codes import Code
from muster.operator.core.evictions import RESTART_SECONDS
from muster.operator.core.preview import preview
from muster.words.preview import Preview, PreviewedEviction


def test_whom_a_job_would_have_make_room_what_that_loses_and_what_lets_it() -> None:
    low = runs("low", "a", "b", "c", "d", ago=7200)
    asked = preview(seen(low), held(low), summary("urgent", gang(4, 5)))
    assert asked == Preview(
        code=Code.AWAITING_PREEMPTION,
        because="gang needs 4 nodes with 8 GPUs each; team/low is asked to commit and make room",
        evictions=(
            PreviewedEviction(
                namespace="team",
                name="low",
                gpus=32,
                nodes=("a", "b", "c", "d"),
                uncommitted_gpu_seconds=32 * 7200,
                restart_gpu_seconds=32 * RESTART_SECONDS,
                because="which has priority 0 where this job has 5",
            ),
        ),
    )


def test_a_smaller_gang_goes_on() -> None:
    elastic = runs("elastic", "a", "b", "c", "d", spec_=gang({"min": 1, "max": 4}))
    (eviction,) = preview(seen(elastic), held(elastic), summary("urgent", gang(3, 5))).evictions
    assert (eviction.gpus, len(eviction.nodes), eviction.nodes_kept) == (24, 3, 1)


def test_a_job_that_starts_or_waits_says_so() -> None:
    low = runs("low", "a")
    assert preview(seen(low), held(low), summary("new", gang(1))).nodes == ("b",)
    full = runs("full", "a", "b", "c", "d", update=served(60))
    waits = preview(seen(full), held(full), summary("same", gang(4)))
    assert (waits.nodes, waits.code, waits.evictions) == ((), Code.AWAITING_CAPACITY, ())
    assert waits.because.endswith("held by team/full 4 nodes (32 GPUs)")


def test_a_preview_is_what_admission_then_does_and_names_no_gang_of_another_project() -> None:
    jobs = [runs(f"cv{i}", name, project="cv", ago=100 - i) for i, name in enumerate("abcd")]
    job = summary("nlp0", gang(2), project="nlp")
    fleet = seen(*jobs, nodes=four(), quotas=shared(cv=1, nlp=1))
    told = preview(fleet, held(*jobs), job)
    plan = admit(seen(*jobs, job, quotas=shared(cv=1, nlp=1)), held(*jobs))
    assert {e.name for e in told.evictions} == {e.uid for e in plan.entries if e.yields_to} == {"cv3", "cv2"}
    assert told.because == plan.waits["nlp0"].because
    assert told.because.endswith("2 gangs of other projects are asked to commit and make room")
    share = "for project nlp holds 0 GPUs of its share of 16, and another project holds 32 GPUs of its share of 16"
    assert [e.because for e in told.evictions] == [share, share]
    assert [e.uncommitted_gpu_seconds for e in told.evictions] == [8 * 97, 8 * 98]
    assert fleet.now == NOW
