"""Secrets of projects: set by maintainers, used by members' jobs, shown to nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import text
from tests.integration.api.people import People, settle
from tests.integration.api.platform import Platform, document, platform

from muster.api.core.cluster.cluster import LocalJobCluster
from muster.secrets.box import SecretBox

VALUE = "hf_a-value-that-nobody-is-shown"
TOKEN: dict[str, Any] = {
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "value"}}}]
}


async def put(here: Platform, name: str, project: str = "default", **data: str) -> None:
    reply = await here.client.put(f"/api/v1/projects/{project}/secrets/{name}", json={"data": data})
    assert reply.status_code in (200, 201), reply.text


@pytest.mark.both_databases
async def test_a_secret_is_set_listed_and_deleted_and_its_value_shown_nowhere(here: Platform) -> None:
    path = "/api/v1/projects/default/secrets"
    made = await here.client.put(f"{path}/hf-token", json={"data": {"value": VALUE}})
    again = await here.client.put(f"{path}/hf-token", json={"data": {"value": VALUE, "user": "ann"}})
    listed = await here.client.get(path)
    job = await here.submit(runtime=TOKEN)
    shown = await here.client.get(f"/api/v1/jobs/{job['id']}")
    clone = await here.client.post(f"/api/v1/jobs/{job['id']}:clone", json={})
    audit = await here.get("/audit")
    gone = await here.client.delete(f"{path}/hf-token")
    missing = await here.client.delete(f"{path}/hf-token")
    assert [each.status_code for each in (made, again, clone, gone, missing)] == [201, 200, 201, 204, 404]
    assert [(item["name"], item["keys"]) for item in listed.json()["items"]] == [("hf-token", ["user", "value"])]
    reference = {"secretKeyRef": {"name": "hf-token", "key": "value", "optional": False}}
    assert shown.json()["spec"]["runtime"]["env"] == [{"name": "HF_TOKEN", "value": "", "valueFrom": reference}]
    acts = [(line["action"], line["before"], line["after"]) for line in audit["items"] if "secret" in line["action"]]
    assert acts == [
        ("secret.set", {"keys": ["value"]}, {"keys": ["user", "value"]}),
        ("secret.set", None, {"keys": ["value"]}),
    ]
    told = "".join(reply.text for reply in (made, again, listed, shown, clone)) + json.dumps(audit)
    assert VALUE not in told
    async with here.services.database.read() as session:
        tables = ("jobs", "events", "audit", "idempotency_keys")
        rows = [str((await session.execute(text(f"SELECT * FROM {table}"))).all()) for table in tables]
    assert VALUE not in "".join(rows)
    assert not any(VALUE.encode() in file.read_bytes() for file in here.state.root.rglob("*") if file.is_file())
    assert here.state.secret_key.stat().st_mode & 0o777 == 0o600


async def test_a_job_that_names_what_is_not_there_is_refused_with_what_is(here: Platform) -> None:
    await put(here, "hf-token", value=VALUE)
    await put(here, "wandb", WANDB_API_KEY="x1", PATH="/tmp")
    env_from = [{"secretRef": {"name": "nothing"}}, {"secretRef": {"name": "none", "optional": True}}]
    env = [
        {"name": "A", "valueFrom": {"secretKeyRef": {"name": "hf-tokens", "key": "value"}}},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "hf-token", "key": "value"}}},
    ]
    refused = await here.client.post("/api/v1/jobs", json=document(runtime={"env": env, "envFrom": env_from}))
    loads = await here.client.post(
        "/api/v1/jobs", json=document(runtime={"envFrom": [{"secretRef": {"name": "wandb"}}]})
    )
    faults = {fault["path"]: fault["message"] for fault in refused.json()["errors"]}
    assert list(faults) == [
        "spec.runtime.env[2].valueFrom.configMapKeyRef",
        "spec.runtime.envFrom[0].secretRef.name",
        "spec.runtime.env[0].valueFrom.secretKeyRef.name",
        "spec.runtime.env[1].valueFrom.secretKeyRef.key",
    ]
    assert (
        "'hf-tokens' (there are hf-token, wandb); set it by `muster secrets set hf-tokens`"
        in faults["spec.runtime.env[0].valueFrom.secretKeyRef.name"]
    )
    assert "has no entry 'token'; it has value" in faults["spec.runtime.env[1].valueFrom.secretKeyRef.key"]
    assert "PATH decides what a process" in loads.json()["errors"][0]["message"]


async def test_two_references_or_a_value_beside_one_are_refused(here: Platform) -> None:
    both = {"secretKeyRef": {"name": "a", "key": "b"}, "configMapKeyRef": {"name": "a", "key": "b"}}
    for env in ({"name": "A", "valueFrom": both}, {"name": "A", "valueFrom": {}}, {**TOKEN["env"][0], "value": "x"}):
        refused = await here.client.post("/api/v1/jobs", json=document(runtime={"env": [env]}))
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_job")


@pytest.mark.parametrize(
    "body",
    [
        {"data": {"value": {"deep": VALUE}}},
        {"data": {"value": [VALUE]}},
        {"data": {VALUE + "/": "x"}},
        {"data": {"value": VALUE, "empty": ""}},
        {"data": {"value": f"http://169.254.169.254/{VALUE}"}},
        {"data": {}},
        {"data": VALUE},
        {VALUE: VALUE},
        VALUE,
    ],
)
async def test_a_bad_secret_is_refused_without_repeating_it(tmp_path: Path, body: Any) -> None:
    async with platform(tmp_path / "state") as here:
        path = "/api/v1/projects/default/secrets/hf-token"
        refused = await here.client.put(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_secret")
        broken = await here.client.put(
            path, content=f'{{"data": {{"value": {VALUE}}}}}', headers={"content-type": "application/json"}
        )
        assert (broken.status_code, broken.json()["code"]) == (400, "invalid_document")
        nul = await here.client.put(
            path, content=f'data: {{value: "{VALUE}\\0"}}', headers={"content-type": "application/yaml"}
        )
        assert nul.status_code in (400, 422)
        assert VALUE not in refused.text + broken.text + nul.text
        assert await here.get("/projects/default/secrets") == {"items": []}


async def test_a_project_has_secrets_of_its_own_and_takes_them_along(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", auth=True) as here:
        people: People = await settle(here, tmp_path / "state")
        path = "/projects/{}/secrets/hf-token"
        assert (
            await people.ask("nlp-maintainer", "PUT", path.format("nlp"), json={"data": {"value": VALUE}})
        ).is_success
        assert (await people.submit("nlp-member", "ours", "nlp", runtime=TOKEN)).status_code == 201
        other = await people.submit("cv-member", "theirs", "cv", runtime=TOKEN)
        assert (other.status_code, "it has none" in other.text) == (422, True)
        await people.ask("admin", "PUT", "/projects/asr", json={})
        await people.ask("admin", "PUT", path.format("asr"), json={"data": {"value": VALUE}})
        assert set(here.cluster.secrets()) == {("asr", "hf-token"), ("nlp", "hf-token")}
        assert (await people.ask("admin", "DELETE", "/projects/asr")).status_code == 204
        assert set(here.cluster.secrets()) == {("nlp", "hf-token")}


async def test_a_key_is_replaced_by_one_above_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with platform(state) as here:
        await put(here, "hf-token", value=VALUE)
        before, key_file = here.cluster.secrets()["default", "hf-token"], here.state.secret_key
    old = key_file.read_text()
    key_file.write_text(f"{Fernet.generate_key().decode()}\n{old}")
    async with platform(state) as here:
        after = here.cluster.secrets()["default", "hf-token"]
    assert after != before
    key_file.write_text(key_file.read_text().splitlines()[0])
    assert SecretBox(key_file).open("default", "hf-token", after) == {"value": VALUE}
    local = LocalJobCluster(here.cluster, SecretBox(key_file))
    key_file.write_text(f"{Fernet.generate_key().decode()}\n{Fernet.generate_key().decode()}\n")
    assert local.renew_secrets() == ("default/hf-token",), "no key opens it any more"


async def test_keys_that_others_may_read_are_not_used(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as here:
        await put(here, "hf-token", value=VALUE)
        here.state.secret_key.chmod(0o644)
        refused = await here.client.put("/api/v1/projects/default/secrets/hf-token", json={"data": {"value": "new"}})
        assert (refused.status_code, refused.json()["code"]) == (503, "secrets_unavailable")
        assert "chmod 600" in refused.json()["detail"]
        listed = await here.get("/projects/default/secrets")
        assert [item["changedAt"] == item["createdAt"] for item in listed["items"]] == [True], "nothing was changed"
