"""Two projects with people in every role, for the tests of who may see and do what."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from tests.integration.api.platform import Platform, document

from muster.api.sweeps.examples import EXAMPLE_SWEEP

PROJECTS = ("nlp", "cv")
# Who they are in their project. `owner` submits its job, and `member` is another one.
ROLES = {"viewer": "viewer", "member": "member", "owner": "member", "maintainer": "maintainer"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@dataclass
class People:
    """Headers by person (`nlp-viewer`, `cv-owner`, …, `admin`), and the job of each project's owner by project."""

    here: Platform
    admin: dict[str, str]
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    fine_tunes: dict[str, str] = field(default_factory=dict)
    sweeps: dict[str, str] = field(default_factory=dict)  # the same
    files: dict[str, str] = field(default_factory=dict)  # the same, of an upload that has begun
    tokens: dict[str, str] = field(default_factory=dict)  # ids, for whoever needs one of a project

    async def ask(self, person: str | None, method: str, path: str, **more: Any) -> httpx2.Response:
        headers = self.headers[person] if person else {}
        return await self.here.client.request(method, f"/api/v1{path}", headers=headers, **more)

    async def token(self, person: str, project: str | None, *scopes: str) -> Any:
        """A token of that person, made by an admin; for every project of theirs if `project` is None."""
        where = {"project": project} if project else {"allProjects": True}
        wanted = {"name": person, "person": person, "scopes": list(scopes or ("admin",)), **where}
        reply = await self.here.client.post("/api/v1/tokens", json=wanted, headers=self.admin)
        assert reply.status_code == 201, reply.text
        return reply.json()

    async def upload(self, person: str, project: str) -> str:
        """The id of an upload of ten bytes that has begun."""
        said = ",".join(
            f"{key} {base64.b64encode(value.encode()).decode()}"
            for key, value in (("filename", "a.txt"), ("purpose", "user_data"), ("project", project))
        )
        headers = {"tus-resumable": "1.0.0", "upload-length": "10", "upload-metadata": said, **self.headers[person]}
        reply = await self.here.client.post("/api/v1/files", headers=headers)
        assert reply.status_code == 201, reply.text
        return str(reply.json()["id"])

    async def give(self, project: str, person: str, role: str) -> None:
        place = f"/api/v1/projects/{project}/members/{person}"
        reply = await self.here.client.put(place, json={"role": role}, headers=self.admin)
        assert reply.status_code == 200, reply.text

    async def sweep(self, project: str) -> None:
        """Let the project's owner create a sweep of one trial."""
        body = sweep_document(f"{project}-sweep", project)
        reply = await self.ask(f"{project}-owner", "POST", "/sweeps", json=body)
        assert reply.status_code == 201, reply.text
        self.sweeps[project] = str(reply.json()["id"])

    async def submit(self, person: str, name: str, project: str | None = None, **spec: Any) -> httpx2.Response:
        body = document(name, **spec)
        if project:
            body["metadata"]["labels"] = {"muster.dev/project": project}
        return await self.ask(person, "POST", "/jobs", json=body)


def sweep_document(name: str, project: str) -> dict[str, Any]:
    labels = {"muster.dev/project": project}
    tried = {"parameters": {"training.seed": {"values": [1]}}, "search": "grid"}
    return {**EXAMPLE_SWEEP, "metadata": {"name": name, "labels": labels}, "sweep": tried}


def token_of(people: People, person: str) -> str:
    return people.headers[person]["authorization"].removeprefix("Bearer ")


async def settle(here: Platform, state: Path) -> People:
    people = People(here, bearer((state / "admin-token").read_text().strip()))
    people.headers["admin"] = people.admin
    for project in PROJECTS:
        made = await here.client.put(f"/api/v1/projects/{project}", json={}, headers=people.admin)
        assert made.status_code == 201, made.text
        for word, role in ROLES.items():
            person = f"{project}-{word}"
            await people.give(project, person, role)
            people.headers[person] = bearer((await people.token(person, None))["token"])
        submitted = await people.submit(f"{project}-owner", f"{project}-job")
        assert submitted.status_code == 201, submitted.text
        people.jobs[project] = submitted.json()["id"]
    return people
