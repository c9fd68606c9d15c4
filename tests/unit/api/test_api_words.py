"""Events, advice, cursors, settings: small pure parts."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from sqlalchemy import make_url

from muster.api.core import settings as api_settings
from muster.api.core.callers import ANONYMOUS, Principal, Scope
from muster.api.core.errors import KINDS, ApiError, problem_body
from muster.api.core.events.types import EventType, events_between
from muster.api.core.http.paging import cursor_of, seq_of
from muster.api.core.settings import ApiSettings, is_loopback
from muster.api.core.submission.clone import merge_patch
from muster.api.tenants.authentication import hash_of, is_acceptable, new_token
from muster.operator.core.conditions import TRAINING_CONDITIONS
from muster.plan.advice import advice
from muster.words.names import ExitCode
from muster.words.signals import Cause
from muster.words.status import Attempt, CheckpointStatus, Condition, Failure, JobStatus, Phase, Progress


def test_every_step_from_phase_to_phase_is_an_event() -> None:
    for old, new in itertools.permutations(Phase, 2):
        found = events_between(
            JobStatus(phase=old, code="A"), JobStatus(phase=new, code="B", because="why", since=7.0), 9.0
        )
        assert [(event.type, event.message, event.at) for event in found] == [(f"job.{new.lower()}", "why", 7.0)]


def test_every_outcome_of_an_attempt_is_an_event() -> None:
    for outcome in ("succeeded", "failed", "suspended", "cancelled", "preempted"):
        running = Attempt(number=1, created_at=1.0, first_step_at=2.0)
        ended = running.model_copy(update={"outcome": outcome, "ended_at": 3.0})
        found = events_between(JobStatus(attempt=1, attempts=(running,)), JobStatus(attempt=1, attempts=(ended,)), 9.0)
        assert [(event.type, event.at) for event in found] == [(f"attempt.{outcome}", 3.0)]


def test_the_same_status_twice_is_no_event() -> None:
    status = JobStatus(
        phase=Phase.RUNNING,
        attempt=1,
        attempts=(Attempt(number=1, created_at=1.0),),
        checkpoint=CheckpointStatus(step=5, committed_at=1.0, uri="x"),
    )
    assert events_between(status, status, 1.0) == ()


def test_an_attempt_is_told_before_its_row_is_there() -> None:
    (event,) = events_between(JobStatus(), JobStatus(attempt=3, resume_step=40), 5.0)
    assert (event.type, event.attempt, event.data["resumeStep"]) == (EventType.ATTEMPT_STARTED, 3, 40)
    again = JobStatus(attempt=3, attempts=(Attempt(number=3, created_at=4.0),))
    assert events_between(JobStatus(attempt=3, resume_step=40), again, 6.0) == ()


def test_a_new_reason_of_waiting_is_an_event() -> None:
    queued = JobStatus(code="AwaitingCapacity", because="a")
    (event,) = events_between(queued, JobStatus(code="GangTooLarge", because="b"), 1.0)
    assert (event.type, event.message) == (EventType.JOB_WAITING, "b")
    running = JobStatus(phase=Phase.RUNNING, code="Preparing")
    assert events_between(running, JobStatus(phase=Phase.RUNNING, code="Training"), 1.0) == ()


def test_there_is_advice_for_every_state_and_cause() -> None:
    for phase, cause in itertools.product(Phase, [None, *Cause]):
        failure = Failure(cause=cause, attempt=1, at=1.0, message="x") if cause else None
        status = JobStatus(phase=phase, code="X", last_failure=failure)
        found = advice(status, suspend=False, cancel=False, handed_over=True, ahead=0)
        running = phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING) or (
            phase == Phase.RESTARTING and failure is None
        )
        assert bool(found) != running, (phase, cause)


def test_a_job_that_this_platform_was_started_without_is_told_how_to_start_it() -> None:
    words = "gang needs 1 node with 8 GPUs each; gang.gpusPerNode is 8 and the largest node has 0"
    status = JobStatus(phase=Phase.QUEUED, code="NodeTooSmall", because=words)
    spec = {"gang": {"nodes": {"min": 2, "max": 4}, "gpusPerNode": 8}}
    given: dict[str, Any] = {"suspend": False, "cancel": False, "handed_over": True, "ahead": 0, "spec": spec}
    first, second = advice(status, **given, name="mine", one_machine=True)
    assert "`muster up --nodes 2 --gpus-per-node 8`" in first
    assert "`muster clone mine --set gang.gpusPerNode=0`" in second
    assert advice(status, **given) == ["Clone the job with a smaller gang.gpusPerNode: no node has that much."]
    memory = status.model_copy(update={"because": "gang.resources.memory is 9 TiB and the largest node has 24 GiB"})
    assert "gang.resources.memory" in advice(memory, **given, one_machine=True)[0]


NO_MORE = "NodeTooSmall"
KILLED = Failure(cause=Cause.OUT_OF_MEMORY, attempt=1, at=1.0, message="worker 0 on a: OOMKilled", exit_code=137)
TOLD = KILLED.model_copy(update={"exit_code": int(ExitCode.OUT_OF_MEMORY)})


@pytest.mark.parametrize(
    ("status", "spec", "told", "untold"),
    [
        (
            JobStatus(code=NO_MORE, because="x; gang.resources.cpu is 64 and the largest node has 8"),
            {},
            ["gang.resources.cpu"],
            ["gpusPerNode", "memory", "gang.nodes"],
        ),
        (
            JobStatus(phase=Phase.FAILED, code="BudgetSpent", last_failure=KILLED),
            {"gang": {"nodes": 1, "resources": {"memory": "200Mi"}}},
            ["larger gang.resources.memory", "200Mi"],
            ["microBatch", "fsdp"],
        ),
        (
            JobStatus(phase=Phase.FAILED, code="BudgetSpent", last_failure=TOLD),
            {"gang": {"nodes": 1}, "training": {"batch": {"microBatch": 1}}},
            ["activationCheckpointing"],
            ["microBatch", "fsdp", "gang.resources"],
        ),
        (
            JobStatus(phase=Phase.FAILED, code="BudgetSpent", last_failure=TOLD),
            {"gang": {"nodes": 2}, "training": {"batch": {"microBatch": 4}, "parallel": {"shard": "ddp"}}},
            ["smaller training.batch.microBatch", "fsdp", "activationCheckpointing"],
            ["gang.resources"],
        ),
        (
            JobStatus(
                phase=Phase.FAILED,
                code="BudgetSpent",
                last_failure=TOLD.model_copy(
                    update={"message": "a rank needs about 90 GiB … It fits with bf16 and 8 ranks in place of 1"}
                ),
            ),
            {"gang": {"nodes": 2}, "training": {"batch": {"microBatch": 4}, "parallel": {"shard": "ddp"}}},
            ["all that one of the reason's changes names"],
            ["microBatch", "fsdp", "activationCheckpointing"],
        ),
    ],
)
def test_advice_is_derived_from_the_limit_that_was_hit(
    status: JobStatus, spec: dict[str, Any], told: list[str], untold: list[str]
) -> None:
    found = " ".join(advice(status, suspend=False, cancel=False, handed_over=True, ahead=0, spec=spec))
    assert all(word in found for word in told), found
    assert not any(word in found for word in untold), found


def test_why_tells_of_what_was_found_in_a_gang_that_trains() -> None:
    lost = Condition(
        type="TrackingFailed", status="True", reason="TrackerLeftOut", message="wandb is left out: no disk"
    )
    well = Condition(type="DataBound", status="False", reason="DataInTime", message="data is there")
    running = JobStatus(phase=Phase.RUNNING, conditions=(well, lost))
    (found,) = advice(running, suspend=False, cancel=False, handed_over=True, ahead=0)
    assert found.startswith("TrackingFailed: wandb is left out: no disk. Training goes on without it")
    for kind in TRAINING_CONDITIONS:
        one = running.model_copy(update={"conditions": (lost.model_copy(update={"type": kind}),)})
        assert len(advice(one, suspend=False, cancel=False, handed_over=True, ahead=0)) == 1, kind


def test_why_tells_of_programs_that_a_verifier_stopped() -> None:
    values = {"unit_tests/out_of_time": 0.4, "unit_tests/out_of_memory": 0.01, "unit_tests": 0.5}
    progress = Progress(values=values, evaluation_values={"held/tests/out_of_memory": 1.0})
    running = JobStatus(phase=Phase.RUNNING, progress=progress)
    slow, large = advice(running, suspend=False, cancel=False, handed_over=True, ahead=0)
    assert slow.startswith("Verifier unit_tests: 40% of the programs that it last ran were stopped at timeoutSeconds")
    assert large.startswith(
        "Verifier held/tests: 100% of the programs that it last ran were stopped at memoryMegabytes"
    )


def test_a_job_that_is_being_cancelled_needs_nothing() -> None:
    (only,) = advice(JobStatus(), suspend=True, cancel=True, handed_over=False, ahead=3)
    assert only.startswith("Nothing")


@given(st.integers(0, 10**17))
def test_cursors_come_back(seq: int) -> None:
    assert seq_of(cursor_of(seq)) == seq


@given(st.text(max_size=40))
def test_other_cursors_are_refused(text: str) -> None:
    with pytest.raises(ApiError, match="invalid_cursor"):
        seq_of(text)


# RFC 7396, appendix A.
@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch(target: object, patch: object, result: object) -> None:
    assert merge_patch(target, patch) == result


def test_tokens() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(is_acceptable(token) for token in tokens)
    assert not is_acceptable("muster_short")
    assert not is_acceptable("x" * 60)
    assert len(hash_of("x")) == 64
    assert all(ANONYMOUS.may(scope) for scope in Scope)
    writer = Principal("x", "ann", frozenset({Scope.WRITE}))
    assert [writer.may(scope) for scope in Scope] == [True, True, False]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_without_tokens_only_loopback(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ValidationError, match="authentication is off"):
        ApiSettings(host=host, auth=False)
    ApiSettings(host=host or "0.0.0.0", auth=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    ApiSettings(host=host, auth=False)


def test_database_addresses(tmp_path: Path) -> None:
    assert ApiSettings(state=tmp_path).database == f"sqlite+aiosqlite:///{tmp_path}/muster.db"
    assert ApiSettings(database_url="postgres://a@b/c").database == "postgresql+asyncpg://a@b/c"
    assert "hunter2" not in repr(ApiSettings(database_url="postgresql://me:hunter2@b/c"))


def test_every_problem_reads_as_rfc_9457_and_as_openai() -> None:
    for code, kind in KINDS.items():
        body = problem_body(ApiError(code, "what happened"), "/x", "id")
        assert (body["status"], body["code"], body["error"]["code"], body["requestId"]) == (
            kind.status,
            code,
            code,
            "id",
        )
        assert body["type"].endswith(code)


@pytest.mark.parametrize(
    ("spelled", "host", "ports"),
    [
        ("postgresql://u:p%40s@a:5433,b/muster?target_session_attrs=read-write", ["a", "b"], [5433, 5432]),
        ("postgresql://u:p@a,b:6000/muster", ["a", "b"], [5432, 6000]),
        ("postgresql://u:p@a:5433/muster", "a", 5433),
        ("postgresql://u:p@/muster?host=a:1&host=b:2", ["a", "b"], [1, 2]),
    ],
)
def test_several_servers_of_a_database_are_spelled_in_two_ways(spelled: str, host: Any, ports: Any) -> None:
    url = make_url(ApiSettings(database_url=SecretStr(spelled)).database)
    _, arguments = url.get_dialect()().create_connect_args(url)
    assert (arguments["host"], arguments["port"], arguments["database"]) == (host, ports, "muster")
    assert (url.username, url.password) == ("u", "p@s" if "%40" in spelled else "p")
    assert ("target_session_attrs" in arguments) == ("target_session_attrs" in spelled)


def test_next_steps_are_commands_with_the_jobs_name() -> None:
    """Whoever reads `why` types commands; routes are for programs, which have the API's description."""

    def steps(phase: Phase, **flags: Any) -> str:
        given = {"suspend": False, "cancel": False, "handed_over": True, "ahead": 0} | flags
        return " ".join(advice(JobStatus(phase=phase), name="mine", **given))

    assert "`muster resume mine`" in steps(Phase.SUSPENDED)
    assert "`muster clone mine`" in steps(Phase.CANCELLED)
    assert "`muster clone mine --set PATH=VALUE`" in steps(Phase.FAILED)
    assert "`muster chat mine`" in steps(Phase.SUCCEEDED)
    assert "`muster export s3://ck/uid --to FOLDER`" in steps(Phase.SUCCEEDED, folder="s3://ck/uid")
    hints = [kind.advice for kind in KINDS.values()]
    assert not [hint for hint in hints if re.search(r"\b(GET|POST|PUT|PATCH|DELETE) [/…]|`:\w+`", hint)]


def test_the_namespace_of_its_own_pod_is_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the chart sets no MUSTER_API_NAMESPACE, and is protected all the same."""
    monkeypatch.setattr(api_settings, "SERVICE_ACCOUNT", tmp_path)
    assert ApiSettings().namespace == ""
    (tmp_path / "namespace").write_text("muster-system\n")
    assert ApiSettings(cluster="kubernetes").is_system_namespace("muster-system")
    monkeypatch.setenv("MUSTER_API_NAMESPACE", "elsewhere")
    assert ApiSettings().namespace == "elsewhere"
