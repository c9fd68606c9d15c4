"""Tokens and names by the command line, against a server of recorded answers."""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from muster.cli import checkpoints, jobs, tokens
from muster.cli.errors import CliError
from muster.client.address import Server
from muster.client.connection import Connection
from muster.client.errors import Unreachable

ID, OLDER = "0c2c31c1-96f9-4f3c-8a39-5b2f9a0f4d11", "11111111-96f9-4f3c-8a39-5b2f9a0f4d11"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], list[tuple[str, str, bytes]]]:
    """Answers by `METHOD path`; returns what was asked."""

    def serve(answers: dict[str, Any]) -> list[tuple[str, str, bytes]]:
        asked: list[tuple[str, str, bytes]] = []

        def answer(request: httpx2.Request) -> httpx2.Response:
            asked.append((request.method, request.url.path.removeprefix("/api/v1/"), request.content))
            found = answers[f"{request.method} {asked[-1][1]}"]
            return httpx2.Response(204) if found is None else httpx2.Response(200, json=found)

        def made(_: str | None) -> Connection:
            return Connection(Server("http://127.0.0.1:1", "test"), transport=httpx2.MockTransport(answer))

        for module in (tokens, checkpoints, jobs):
            monkeypatch.setattr(module, "connect", made)
        return asked

    return serve


def token(number: str, name: str) -> dict[str, Any]:
    return {
        "id": number, "name": name, "person": "ann", "project": None, "scopes": ["write"],
        "createdAt": 1e9, "expiresAt": None, "lastUsedAt": None,
    }  # fmt: skip


def test_a_token_is_printed_alone(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked = server({"POST tokens": token(ID, "ci") | {"token": "muster_abc"}})
    tokens.create("ci", tokens.Scope.READ, 90)
    shown = capsys.readouterr()
    assert shown.out == "muster_abc\n", "so that a script can take it"
    assert "ci may read; id 0c2c31c1" in shown.err
    assert asked[0][2] == b'{"name":"ci","scopes":["read"],"expiresInDays":90}'


def test_a_lost_answer_makes_no_second_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def lost(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        raise httpx2.ReadError("the connection broke")

    made = Connection(Server("http://127.0.0.1:1", "test"), transport=httpx2.MockTransport(lost))
    monkeypatch.setattr(tokens, "connect", lambda _: made)
    with pytest.raises(Unreachable, match="the connection broke"):
        tokens.create("ci")
    assert len(asked) == 1


def test_tokens_are_listed_and_revoked_by_id_or_name(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"items": [token(ID, "ci"), token(OLDER, "twice"), token("x", "twice")]}
    asked = server({"GET tokens": listed, f"DELETE tokens/{ID}": None})
    tokens.ls()
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[:3] == [ID, "ci", "ann"]
    assert "never" in rows[1]
    tokens.revoke("ci")
    tokens.revoke(ID.upper())
    assert [what[:2] for what in asked if what[0] == "DELETE"] == [("DELETE", f"tokens/{ID}")] * 2
    for name, message in (("twice", "2 tokens are named 'twice'"), ("nobody", "there is no token named 'nobody'")):
        with pytest.raises(CliError, match=message):
            tokens.revoke(name)


def test_export_by_name_offers_the_older_job_by_its_id(server: Any) -> None:
    """The newest job of the name has no commit: an older one is offered and never taken instead."""
    answers = {
        "GET jobs": {
            "items": [{"id": ID, "checkpointStep": None}, {"id": OLDER, "checkpointStep": 40}],
            "nextCursor": None,
        },
        f"GET jobs/{ID}/checkpoints": {"uri": "s3://bucket/x", "items": []},
        f"GET jobs/{ID}": {"status": {"checkpoint": None}},
    }
    server(answers)
    with pytest.raises(CliError, match=r"base means the newest job .* which has no checkpoint yet") as raised:
        checkpoints.folder_of("base", None)
    assert f"1 older job of that name with checkpoints: {OLDER} (step 40)" in raised.value.next_step
    server({**answers, f"GET jobs/{ID}": {"status": {"checkpoint": {"step": 3}}}})
    assert checkpoints.folder_of("base", None) == "s3://bucket/x"


def test_a_jobs_commits_are_inspected_and_pinned_by_the_api(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks need not reach the job's folder: the API does."""
    commit = {
        "step": 40, "attempt": 2, "committedAt": 1040.0, "worldSize": 2, "tokens": 99, "metrics": {"loss": 2.0},
        "best": True, "bytes": 30, "pinned": True, "uri": "s3://bucket/x/commits/step-00000040.json", "job": "base",
        "files": [{}], "elements": 1000, "tensorBytes": 4000, "versions": {"muster": "1"},
        "tensors": {"model/w": {"dtype": "F32", "shape": [10, 100], "slices": 2}},
    }  # fmt: skip
    path = f"jobs/{ID}/checkpoints"
    asked = server({
        f"GET {path}/last": commit, f"GET {path}/40": commit,
        f"POST {path}/40:pin": {"step": 40, "pinned": True, "changed": True},
        f"POST {path}/40:unpin": {"step": 40, "pinned": False, "changed": False},
    })  # fmt: skip
    checkpoints.inspect(ID)
    checkpoints.inspect(ID, 40)
    shown = capsys.readouterr().out
    assert shown.count("step 40 of base, best, pinned") == 2
    assert "model/w  F32    10×100" in shown
    checkpoints.pin(ID, 40)
    checkpoints.unpin(ID, 40)
    assert "Step 40 is pinned." in (said := capsys.readouterr().err)
    assert "Step 40 is not pinned, as before." in said
    assert [what[:2] for what in asked] == [
        ("GET", f"{path}/last"), ("GET", f"{path}/40"), ("POST", f"{path}/40:pin"), ("POST", f"{path}/40:unpin")
    ]  # fmt: skip


def test_a_spec_says_what_must_be_filled_in(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job = {
        "id": ID, "apiVersion": "muster.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "base"},
        "spec": {"runtime": {"env": [{"name": "HF_TOKEN", "value": "***"}]}},
    }  # fmt: skip
    server({f"GET jobs/{ID}": job})
    jobs.get(ID, output_spec=True)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "# fill in: spec.runtime.env[0].value"
    assert "fill in what is hidden before you submit this: spec.runtime.env[0].value" in shown.err
