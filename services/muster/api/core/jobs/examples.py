"""Examples for the OpenAPI document, made by the code that makes the replies, so that they can't part from it."""

from __future__ import annotations

from typing import Any

from muster.api.core.database.tables import JobRow
from muster.api.core.http.openapi import AT, EXAMPLE_JOB, UID
from muster.api.core.jobs.schemas import job_document, job_summary
from muster.documents.prices import load_prices
from muster.recipe.document import parse_job
from muster.words.base import dump
from muster.words.signals import Cause
from muster.words.status import (
    Attempt,
    CheckpointStatus,
    Failure,
    GangStatus,
    GoodputAccount,
    JobStatus,
    Phase,
    Progress,
    Restart,
    Restarts,
)

EXAMPLE_SUBMISSION = parse_job(EXAMPLE_JOB)

FAILURE = Failure(
    cause=Cause.INFRASTRUCTURE,
    attempt=1,
    at=AT + 95,
    message="worker 1 was killed by signal 9",
    worker=1,
    rank=1,
    node="node-1",
    step=88,
    exit_code=137,
)
ATTEMPTS = (
    Attempt(
        number=1,
        created_at=AT + 1,
        nodes=("node-0", "node-1"),
        workers=2,
        gpus_per_worker=1,
        instance_type="p5.48xlarge",
        capacity="on-demand",
        world_size=2,
        first_step_at=AT + 9,
        ended_at=AT + 95,
        last_step=88,
        lost_steps=8,
        cause=Cause.INFRASTRUCTURE,
        outcome="failed",
        message=FAILURE.message,
    ),
    Attempt(
        number=2,
        created_at=AT + 97,
        nodes=("node-0", "node-1"),
        workers=2,
        gpus_per_worker=1,
        instance_type="p5.48xlarge",
        capacity="on-demand",
        world_size=2,
        resume_step=80,
        first_step_at=AT + 105,
    ),
)
STATUS = JobStatus(
    phase=Phase.RUNNING,
    code="Training",
    because="2 of 2 workers train",
    since=AT + 105,
    attempt=2,
    resume_step=80,
    gang=GangStatus(wanted=2, ready=2, nodes=("node-0", "node-1")),
    progress=Progress(
        step=124, steps=200, loss=2.31, evaluation_loss=2.4, tokens_per_second=18_200.0, eta_seconds=68.0
    ),
    checkpoint=CheckpointStatus(
        step=120, committed_at=AT + 140, uri=f"file:///var/lib/muster/checkpoints/{UID}", best_step=100
    ),
    restarts=Restarts(
        total=1, by_cause={Cause.INFRASTRUCTURE: 1}, recent=(Restart(at=AT + 95, cause=Cause.INFRASTRUCTURE),)
    ),
    last_failure=FAILURE,
    queued_at=AT,
    started_at=AT + 1,
    ledger=GoodputAccount(seconds={"queue": 1.0, "starting": 16.0, "productive": 118.0, "lost": 7.0}, since=AT + 142),
    attempts=ATTEMPTS,
)
ROW = JobRow(
    seq=1,
    id=UID,
    namespace="default",
    name=EXAMPLE_SUBMISSION.name,
    project="default",
    owner="ann",
    labels=EXAMPLE_SUBMISSION.labels,
    spec=dump(EXAMPLE_SUBMISSION.spec),
    spec_version=1,
    relayed_version=1,
    priority=0,
    created_at=AT,
    live=True,
    phase=STATUS.phase,
    status=dump(STATUS),
    finished_at=None,
    tags="baseline",
    note="",
)
JOB: dict[str, Any] = job_document(ROW, load_prices(), "ann")
JOB_LIST: dict[str, Any] = {"items": [job_summary(ROW)], "nextCursor": None}
