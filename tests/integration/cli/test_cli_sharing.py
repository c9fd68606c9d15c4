"""Projects, people, secrets, the audit and deletion by the command line, against the whole API."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.integration.api.people import bearer
from tests.integration.api.platform import Platform, document, served, until
from tests.integration.api.webhook_receiver import receiver
from typer.testing import CliRunner

from muster.cli import output
from muster.cli.main import app
from muster.client.errors import MusterError
from muster.words.status import Phase


@dataclass
class Shell:
    """Where somebody types commands."""

    url: str
    token: str

    async def run(self, *words: str, given: str | bytes = "") -> str:
        """Standard output. Raises MusterError as the command does."""
        environment = {"MUSTER_SERVER": self.url, "MUSTER_TOKEN": self.token, "COLUMNS": "200"}

        def invoke() -> str:
            output.answers.cache_clear()
            output.messages.cache_clear()
            done = CliRunner().invoke(app, list(words), input=given, env=environment, catch_exceptions=True)
            if isinstance(done.exception, Exception):
                raise done.exception
            assert done.exit_code == 0, done.output
            return done.stdout

        return await asyncio.to_thread(invoke)

    async def document(self, *words: str, given: str | bytes = "") -> Any:
        return json.loads(await self.run(*words, "--json", given=given))

    async def code(self, *words: str, given: str | bytes = "") -> str:
        """The code of the refusal."""
        with pytest.raises(MusterError) as refused:
            await self.run(*words, given=given)
        return refused.value.code


@dataclass
class Team:
    here: Platform
    admin: Shell
    ann: Shell  # a maintainer of nlp
    bob: Shell  # a viewer of it


@pytest.fixture
async def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Team]:
    monkeypatch.setattr(output._OutputFormat, "json", False)
    # The server's log goes to standard output, which a command of this process has for itself.
    with structlog.testing.capture_logs():
        async with served(tmp_path / "state", auth=True, webhook_networks=["127.0.0.0/8"]) as (here, _):
            yield await settled(here)
    output.answers.cache_clear()
    output.messages.cache_clear()


async def settled(here: Platform) -> Team:
    url = str(here.client.base_url).rstrip("/")
    admin = Shell(url, here.state.admin_token.read_text().strip())
    await admin.run("people", "set", "ann")
    await admin.run("people", "set", "bob")
    await admin.run("projects", "set", "nlp", "--set", "gangSizes=[1,2]", "--set", "quota.gpus=8")
    await admin.run("projects", "add", "nlp", "ann", "--role", "maintainer")
    await admin.run("projects", "add", "nlp", "bob", "--role", "viewer")
    made = ("tokens", "create", "t", "--scope", "admin", "--project", "nlp", "--person")
    ann, bob = [Shell(url, (await admin.run(*made, person)).strip()) for person in ("ann", "bob")]
    return Team(here, admin, ann, bob)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


async def test_projects_and_people(team: Team) -> None:
    assert await team.ann.run("whoami") == "ann, by a token for admin in project nlp\n  maintainer of nlp\n"
    assert (await team.admin.document("whoami"))["admin"]
    shown = rows(await team.bob.run("projects", "get", "nlp"))
    for line in (
        ["namespace", "nlp"],
        ["gangSizes", "1,", "2"],
        ["quota.gpus", "8"],
        ["maintainer", "ann"],
        ["viewer", "bob"],
    ):
        assert line in shown
    assert ["nlp", "nlp", "viewer"] in rows(await team.bob.run("projects", "ls"))
    await team.admin.run("projects", "set", "nlp", "--set", "gangSizes=")
    limits = (await team.admin.document("projects", "get", "nlp"))["limits"]
    assert (limits.get("gangSizes"), limits["quota"]["gpus"]) == (None, 8), "what is not named stays"
    assert await team.bob.code("projects", "set", "nlp", "--set", "gangSizes=[4]") == "forbidden"
    assert await team.bob.code("projects", "add", "nlp", "bob", "--role", "maintainer") == "forbidden"
    assert await team.bob.code("people", "ls") == "forbidden"
    assert await team.bob.code("projects", "get", "cv") == "project_not_found"

    await team.admin.run("people", "set", "ci", "--service")
    people = {line[0]: line[1:3] for line in rows(await team.admin.run("people", "ls"))}
    assert people["ci"][0] == "service"
    assert people["ann"][0] == "person"
    await team.ann.run("projects", "remove", "nlp", "bob")
    assert await team.bob.code("projects", "get", "nlp") == "project_not_found"
    assert (await team.bob.document("projects", "ls"))["items"] == []
    await team.admin.run("people", "set", "ann", "--disabled")
    assert await team.ann.code("whoami") == "unauthorized"


async def test_webhooks_are_made_tried_changed_and_looked_at(team: Team, tmp_path: Path) -> None:
    ann = team.ann
    with receiver() as there:
        secret = await ann.run("webhooks", "add", "on-call", f"{there.url}/ok", "--on", "job.failed")
        assert secret.startswith("whsec_")
        assert (await ann.document("webhooks", "test", "on-call"))["status"] == "delivered"
        assert len(there.heard("/ok")) == 1
        await ann.run(
            "webhooks", "set", "on-call", "--url", f"{there.url}/500", "--preset", "slack", "--wait-minutes", "5"
        )
        (shown,) = (await ann.document("webhooks", "ls"))["items"]
        with pytest.raises(AssertionError):  # the exit code is not 0
            await ann.run("webhooks", "test", "on-call")
    assert (shown["preset"], shown["waitSeconds"], shown["kinds"]) == ("slack", 300.0, ["job.failed"])
    failed, delivered = rows(await ann.run("webhooks", "deliveries", "on-call"))[1:]
    assert ("answered 500" in " ".join(failed), delivered[1:3]) == (True, ["webhook.test", "delivered"])
    assert (await ann.document("webhooks", "replay", "on-call", delivered[0]))["status"] == "waiting"
    assert (await ann.run("webhooks", "rotate", "on-call")).strip() not in (secret, "")
    assert await ann.code("webhooks", "set", "on-call") == "nothing-to-change"
    assert await ann.code("webhooks", "add", "bad", "https://10.0.0.1/") == "invalid_webhook"
    assert await team.bob.code("webhooks", "ls") == "forbidden"
    await ann.run("webhooks", "rm", "on-call")
    assert await ann.code("webhooks", "test", "on-call") == "webhook_not_found"


async def test_secrets_are_set_from_input_or_files_listed_and_never_shown(team: Team, tmp_path: Path) -> None:
    told = await team.ann.run("secrets", "set", "hf-token", given="s3cr3t-value\n")
    file = tmp_path / "key.pem"
    file.write_text("line one\nline two\n")
    told += await team.ann.run("secrets", "set", "pair", "--from-file", str(file), "--from-file", f"cert={file}")
    told += await team.bob.run("secrets", "ls")
    assert "s3cr3t" not in told
    assert "line one" not in told
    listed = (await team.bob.document("secrets", "ls", "--project", "nlp"))["items"]
    assert [(each["name"], each["keys"], each["changedBy"]) for each in listed] == [
        ("hf-token", ["value"], "ann"),
        ("pair", ["cert", "key.pem"], "ann"),
    ]
    assert await team.bob.code("secrets", "set", "hf-token", given="other") == "forbidden"
    assert await team.bob.code("secrets", "rm", "hf-token") == "forbidden"
    for given in ("", "\n", b"\xff\xfe"):
        assert await team.ann.code("secrets", "set", "hf-token", given=given) == "bad-secret"
    assert await team.ann.code("secrets", "set", "hf-token", "--from-file", str(tmp_path / "none")) == "no-file"
    assert await team.ann.document("secrets", "rm", "hf-token") == {"name": "hf-token", "deleted": True}
    assert await team.ann.code("secrets", "rm", "hf-token") == "secret_not_found"


async def test_what_was_done_is_said_and_a_job_goes_only_when_it_has_ended(team: Team, tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps(document("mine")))
    submitted = await team.ann.document("submit", str(job), "--yes")
    uid = submitted["id"]
    assert await team.bob.code("rm", "mine") == "forbidden"
    assert await team.ann.code("rm", "mine") == "job_live"
    assert await team.ann.code("rm", "another") == "job_not_found"
    assert await team.admin.code("projects", "rm", "nlp") == "project_in_use"
    await _ended(team, uid)
    removing = asyncio.create_task(team.ann.document("rm", "mine"))

    async def marked() -> bool:
        return team.here.cluster.get(uid).metadata.deletion_timestamp is not None

    await until(marked, "the mark")
    team.here.cluster.remove(uid)
    assert await removing == {"deleted": [uid], "errors": []}

    lines = [json.loads(line) for line in (await team.ann.run("audit", "--format", "jsonl")).splitlines()]
    assert {line["project"] for line in lines} == {"nlp"}, "a maintainer reads the project's"
    deed = next(line for line in lines if line["action"] == "job.deleted")
    assert (deed["person"], deed["subject"], deed["before"]["name"]) == ("ann", uid, "mine")
    table = list(csv.DictReader(io.StringIO(await team.admin.run("audit", "--format", "csv"))))
    assert {"person.changed", "project.changed", "member.changed", "token.made", "job.submitted", "job.deleted"} <= {
        line["action"] for line in table
    }
    assert all(line["address"] == "127.0.0.1" for line in table if line["person"] == "ann")
    newest = (await team.admin.document("audit", "--limit", "1", "--action", "job.deleted"))["items"]
    assert [line["subject"] for line in newest] == [uid]
    assert "job.deleted" in await team.admin.run("audit")
    assert (await team.bob.document("audit"))["items"] == [], "a viewer reads none of it"


async def _ended(team: Team, uid: str) -> None:
    headers = bearer(team.ann.token)

    async def look() -> Any:
        return (await team.here.client.get(f"/api/v1/jobs/{uid}", headers=headers)).json()

    async def handed_over() -> bool:
        return bool((await look())["handedOver"])

    async def over() -> bool:
        return bool((await look())["status"]["phase"] == Phase.SUCCEEDED)

    await until(handed_over, "the hand-over")
    team.here.operate(uid, phase=Phase.SUCCEEDED, code="Done", because="done", finished_at=1.0, since=1.0)
    await until(over, "the end")
