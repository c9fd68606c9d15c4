"""A platform with pages, and a job on it that has had a life."""

from __future__ import annotations

import html
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from sqlalchemy import delete, select, update
from tests.integration.api.platform import Platform

from muster.api.core.database.tables import EventRow, JobRow
from muster.api.core.events import repository as events
from muster.api.core.events.types import EventType, NewEvent
from muster.words.data_report import (
    DATA_REPORT_KEY,
    DataReport,
    LeftOut,
    LengthCount,
    ShownSample,
    SourceReport,
    Stretch,
)
from muster.words.names import LOG, STEP_LOG
from muster.words.status import Attempt, CheckpointStatus, Failure, GangStatus, GoodputAccount, Phase, Progress

HTML = {"accept": "text/html"}


@dataclass
class Browser:
    """Keeps cookies and reads forms as a browser without JavaScript would."""

    client: httpx2.AsyncClient

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self.client.get(path, headers={**HTML, **headers})

    async def post(self, path: str, form: dict[str, Any] | None = None, **headers: str) -> httpx2.Response:
        sent = {"sec-fetch-site": "same-origin", **{key.replace("_", "-"): value for key, value in headers.items()}}
        return await self.client.post(path, data=form or {}, headers={**HTML, **sent})

    async def form_token(self, path: str = "/jobs") -> str:
        page = await self.get(path)
        match = re.search(r'name="form_token" value="([^"]+)"', page.text)
        assert match, page.text[:2_000]
        return match[1]

    async def sign_in(self, token: str) -> None:
        reply = await self.post("/sign-in", {"token": token, "next": "/jobs"})
        assert (reply.status_code, reply.headers["location"]) == (303, "/jobs"), reply.text[:500]


def notes(page: httpx2.Response) -> list[str]:
    return [html.unescape(words) for words in re.findall(r'<p class="notice[^>]*>(.*?)</p>', page.text, re.DOTALL)]


async def lived(
    here: Platform, name: str = "llama-sft", message: str = "worker 1 was killed by signal 9", **spec: Any
) -> str:
    """A job whose first attempt failed and whose second one trains. Returns its id."""
    uid = (await here.submit(name, **spec))["id"]
    await here.handed_over(uid)
    now = time.time()
    first = Attempt(
        number=1,
        created_at=now - 300,
        nodes=("node-0", "node-1"),
        workers=2,
        world_size=2,
        first_step_at=now - 280,
        ended_at=now - 120,
        last_step=88,
        lost_steps=8,
        cause="infrastructure",
        outcome="failed",
        message=message,
    )
    second = Attempt(
        number=2,
        created_at=now - 110,
        nodes=("node-0", "node-2"),
        workers=2,
        world_size=2,
        resume_step=80,
        first_step_at=now - 90,
    )
    here.operate(
        uid,
        phase=Phase.RUNNING,
        code="Running",
        because="training at step 124",
        since=now - 90,
        attempt=2,
        attempts=(first, second),
        started_at=now - 300,
        gang=GangStatus(wanted=2, ready=2, nodes=("node-0", "node-2")),
        progress=Progress(at=now, step=124, steps=200, loss=2.31, tokens_per_second=18_200.0, eta_seconds=76.0),
        checkpoint=CheckpointStatus(step=120, committed_at=now - 20, uri="file:///checkpoints"),
        ledger=GoodputAccount(seconds={"productive": 230.0, "starting": 40.0, "lost": 20.0, "queue": 10.0}, since=now),
        last_failure=Failure(
            cause="infrastructure", attempt=1, at=now - 120, message=message, rank=1, log_tail=f"… {message}"
        ),
    )
    await here.phase(uid, "Running")
    await _remember(here, uid, now, message)
    for number, steps in ((1, range(1, 89)), (2, range(81, 125))):
        folder = here.state.worker(uid, number, 0)
        write_log(folder, steps, f"attempt {number}: {message}")
    here.commit(uid, 80)
    here.commit(uid, 120, attempt=2, metrics={"loss": 2.33})
    (here.state.checkpoints / uid / DATA_REPORT_KEY).write_text(data_report(message).model_dump_json(by_alias=True))
    return uid


def data_report(words: str) -> DataReport:
    stretches = (
        Stretch(document=0, text=f"a question: {words}", tokens=3, learnt=False),
        Stretch(document=0, text="an answer", tokens=2, learnt=True),
    )
    source = SourceReport(
        source=f"s3://data/{words[:200]}",
        use="training",
        format="openai-chat",
        documents=40,
        tokens=1000,
        learnt=410,
        lengths=(LengthCount(first=16, last=31, documents=40),),
        left_out=(LeftOut(reason="no turn to learn from", documents=1, examples=(words[:200],)),),
    )
    sample = ShownSample(stretches=stretches, padding=3)
    return DataReport(
        sequence_length=8,
        samples_per_epoch=40,
        samples_per_step=4,
        sources=(source,),
        warnings=(words[:200],),
        shown=(sample,),
    )


async def _remember(here: Platform, uid: str, now: float, message: str) -> None:
    """The events of that life, which the mirror would have made of each status as it came."""
    story = (
        (300, EventType.JOB_STARTING, "attempt 1 starts", {}),
        (280, EventType.JOB_RUNNING, "training", {}),
        (200, EventType.CHECKPOINT_COMMITTED, "the checkpoint of step 40 is saved", {"step": 40}),
        (150, EventType.CHECKPOINT_COMMITTED, "the checkpoint of step 80 is saved", {"step": 80}),
        (140, EventType.JOB_SUSPECTED, "worker 1 has made no step for 15 s", {}),
        (120, EventType.ATTEMPT_FAILED, message, {"cause": "infrastructure"}),
        (120, EventType.JOB_RESTARTING, "attempt 1 failed (infrastructure)", {}),
        (110, EventType.JOB_STARTING, "attempt 2 starts from the checkpoint of step 80", {}),
        (90, EventType.JOB_RUNNING, "training", {}),
        (20, EventType.CHECKPOINT_COMMITTED, "the checkpoint of step 120 is saved", {"step": 120}),
    )
    async with here.services.database.write() as session:
        row = await session.get_one(JobRow, (await session.scalars(select(JobRow.seq).where(JobRow.id == uid))).one())
        row.created_at = now - 320
        await session.execute(delete(EventRow).where(EventRow.job_id == uid, EventRow.number > 1))
        await session.execute(update(EventRow).where(EventRow.job_id == uid).values(at=row.created_at))
        row.last_event = 1
        await session.flush()
        told = [
            NewEvent(kind, now - before, words, 2 if before < 120 else 1, data) for before, kind, words, data in story
        ]
        await events.append(session, uid, told)


def write_log(folder: Path, steps: range, words: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = [f'{{"type":"step","step":{step},"loss":{3.5 - step / 100}}}\n' for step in steps]
    (folder / STEP_LOG).write_text("".join(records))
    (folder / LOG).write_text(f"{words}\n" + "".join(f"step {step} of 200\n" for step in steps))
