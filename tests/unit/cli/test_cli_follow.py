"""Watching a job: what is new at each look, what a pipe is told, and how the end decides the exit code."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from muster.cli import follow, output
from muster.cli.errors import ExitStatus
from muster.cli.follow import JobMoment, MomentDisplay, conclude, moments
from muster.client import following

JOB_ID = "6f1f7a0e-8f0a-4c6e-9a55-0d0f3c1c3a11"


def job(phase: str = "Running", attempt: int = 1, resume: int = 0, **status: Any) -> dict[str, Any]:
    told = {"phase": phase, "attempt": attempt, "resumeStep": resume, "because": f"because {phase}", **status}
    return {"id": JOB_ID, "metadata": {"name": "mine"}, "status": told}


def step(number: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {"step": number, "attempt": attempt, "steps": 20, "loss": 5.0 - number / 10, "stepSeconds": 0.5, **more}


class FakeApi:
    """Answers `get` from a script: one (job, events, points) per look. Notes what was asked of metrics."""

    def __init__(self, *looks: tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]) -> None:
        self.looks, self.now = list(looks), looks[0]
        self.asked: list[tuple[str, int]] = []

    def get(self, path: str, **params: Any) -> Any:
        if path.endswith("/events"):
            self.asked.append(("events", params["after"]))
            return {"items": self.now[1]}
        if path.endswith("/metrics"):
            self.asked.append(("metrics", params["afterStep"]))
            return {"points": self.now[2]}
        self.now = self.looks.pop(0)
        return self.now[0]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_SECONDS", 0)


def test_each_look_brings_what_is_new() -> None:
    created, failed = {"id": 1, "type": "job.created"}, {"id": 4, "type": "attempt.failed"}
    api = FakeApi(
        (job("Queued", attempt=0), [created], []),
        (job(), [], [step(1), step(2)]),
        (job(), [], []),
        (job("Restarting"), [failed], []),
        (job(attempt=2, resume=2), [], [step(2), step(3, attempt=2)]),
        (job("Succeeded", attempt=2), [], []),
    )
    seen = list(moments(api, JOB_ID))  # type: ignore[arg-type]
    assert [moment.events for moment in seen] == [(created,), (), (), (failed,), (), ()]
    assert [[entry["step"] for entry in moment.steps] for moment in seen] == [[], [1, 2], [1, 2], [], [3], []]
    assert [value for kind, value in api.asked if kind == "metrics"] == [0, 2, 2]
    assert [value for kind, value in api.asked if kind == "events"] == [0, 1, 1, 1, 4, 4]


def test_progress_is_that_of_the_newest_step_and_of_the_status_at_the_end() -> None:
    told = {"step": 3, "steps": 20, "loss": 4.7, "evaluationLoss": 4.9, "etaSeconds": 99.0}
    running = JobMoment(job(progress=told), steps=(step(5), step(6, tokensPerSecond=100.0)))
    assert running.progress == {
        "step": 6, "steps": 20, "loss": 4.4, "tokensPerSecond": 100.0, "evaluationLoss": 4.9, "etaSeconds": 7.0,
    }  # fmt: skip
    assert JobMoment(job("Succeeded", progress=told), steps=(step(6),)).progress == told
    assert JobMoment(job()).progress == {}
    at_the_start = JobMoment(job(), steps=(step(0, stepSeconds=0.0),)).progress
    assert at_the_start["etaSeconds"] is None, "nothing is known of the speed yet: no `ETA 0s`"


def test_a_pipe_gets_a_line_per_phase_and_the_happenings(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"id": 2, "type": "attempt.failed", "at": 0.0, "attempt": 1, "message": "rank 1 was killed by SIGKILL"}
    quiet = {"id": 1, "type": "job.queued", "at": 0.0, "attempt": None, "message": "nothing to tell"}
    with MomentDisplay("mine") as display:
        for moment in (
            JobMoment(job("Queued", attempt=0), (quiet,)),
            JobMoment(job("Queued", attempt=0)),
            JobMoment(job(), steps=(step(1), step(2))),
            JobMoment(job(), steps=(step(3),)),
            JobMoment(job("Restarting"), (failed,)),
        ):
            display.show(moment)
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "Queued (attempt 0): because Queued",
        "Running (attempt 1): step 2/20, loss 4.8000, ETA 9s",
        "#1   attempt.failed           rank 1 was killed by SIGKILL",
        "Restarting (attempt 1): because Restarting",
    ]
    assert display.losses == [4.9, 4.8, 4.7]


def test_the_live_picture_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    display = MomentDisplay("mine", losses=[5.0, 4.0])
    picture = display._picture(JobMoment(job(), steps=(step(6, tokensPerSecond=51_234.0),)))
    Console(width=160).print(picture)
    text = capsys.readouterr().out
    for word in ("mine", "Running", "attempt 1", "6/20", "4.4000", "51.2k tokens/s", "ETA 7s"):
        assert word in text


@pytest.mark.parametrize(
    ("phase", "code", "words"),
    [
        ("Succeeded", ExitStatus.OK, "mine succeeded: step 20/20"),
        ("Failed", ExitStatus.FAILED, "mine failed: because Failed"),
        ("Cancelled", ExitStatus.FAILED, "mine was cancelled: because Cancelled"),
    ],
)
def test_the_end_decides_the_exit_code(
    phase: str, code: ExitStatus, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {"cause": "user_error", "attempt": 1, "message": "no such file: x", "logTail": "a\n[b] c\n"}
    ended = job(phase, progress={"step": 20, "steps": 20}, lastFailure=failure if phase == "Failed" else None)
    assert conclude(ended) is code
    text = capsys.readouterr().err
    assert words in text
    assert ("user_error in attempt 1: no such file: x" in text) is (phase == "Failed")
    assert ("  | [b] c" in text) is (phase == "Failed"), "brackets are not markup"


@pytest.mark.parametrize(
    ("spec", "kept", "commands"),
    [
        ({"training": {}}, True, ["chat mine", "export mine --to FOLDER", "serve mine", "open mine"]),
        ({"training": {}}, False, ["open mine"]),
        ({"program": {"command": ["a"]}}, True, ["logs mine", "checkpoints ls mine"]),
        ({"program": {"command": ["a"]}}, False, ["logs mine"]),
    ],
)
def test_success_leads_on(
    spec: dict[str, Any], kept: bool, commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = job("Succeeded", progress={"step": 20}, checkpoint={"uri": "file:///ck"} if kept else None)
    conclude(ended | {"spec": spec})
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.split("    ")[0].split("muster ")[1].strip() for line in lines[: len(commands)]] == commands
    assert lines[len(commands) :] == (["  checkpoints: file:///ck"] if kept else [])


def test_a_long_start_is_said_every_fifteen_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 110.0, 116.0, 120.0, 132.0])
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 0.0))
    with MomentDisplay("mine") as display:
        for _ in range(5):
            display.show(JobMoment(job("Starting")))
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "Starting (attempt 1): because Starting",
        "Starting (attempt 1): because Starting, for 16s",
        "Starting (attempt 1): because Starting, for 32s",
    ]


def test_ctrl_c_detaches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> Any:
        yield JobMoment(job())
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "moments", interrupted)
    assert follow.follow(None, job()) is ExitStatus.INTERRUPTED  # type: ignore[arg-type]
    text = capsys.readouterr().err
    assert "Detached; mine goes on." in text
    assert "muster cancel mine" in text


def test_following_with_json_is_a_document_per_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was one document over many lines, and only at the end."""
    monkeypatch.setattr(output._OutputFormat, "json", True)
    progress = {"step": 1, "steps": 20}
    api = FakeApi(
        (job("Queued", attempt=0), [], []),
        (job("Queued", attempt=0), [], []),
        (job(progress=progress), [], []),
        (job("Succeeded", progress={"step": 20, "steps": 20}), [], []),
    )
    assert follow.follow(api, job()) is ExitStatus.OK  # type: ignore[arg-type]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"]["phase"] for line in lines] == ["Queued", "Running", "Succeeded"]
