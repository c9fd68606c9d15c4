"""`muster --context` and `muster doctor` on a real control plane, as a person whose kubeconfig logs in by a plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.house import CHART, SYSTEM, House, quick_job
from tests.polling import eventually

from muster.kube import paths

PLUGIN = """#!{python}
import json, os, pathlib
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
status = {{"token": pathlib.Path({token!r}).read_text()}}
print(json.dumps({{"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": status}}))
"""


class Desk:
    """A person with a service account's rights, whose token comes from an exec plugin, and the `muster` command."""

    def __init__(self, house: House, folder: Path, account: str) -> None:
        self.house, self.folder, self.account = house, folder, account
        service_accounts = paths.core("team", "serviceaccounts")
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
        house.client.create(service_accounts, body)
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        made = house.client.create(f"{service_accounts}/{account}/token", request)
        token, plugin = folder / "token", folder / "plugin"
        token.write_text(made["status"]["token"])
        plugin.write_text(PLUGIN.format(python=sys.executable, token=str(token)))
        plugin.chmod(0o755)
        user = {"exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never",
        }}  # fmt: skip
        self.kubeconfig = folder / "kubeconfig"
        house.plane.write_kubeconfig(self.kubeconfig, user)  # type: ignore[arg-type]
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["contexts"][0] = {"name": "desk", "context": {"cluster": "it", "user": "it", "namespace": "team"}}
        self.kubeconfig.write_text(yaml.safe_dump(config | {"current-context": "elsewhere"}))

    def muster(self, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig), "COLUMNS": "200", "HOME": str(self.folder)}
        command = [sys.executable, "-m", "muster.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def ask(self, *words: str, expect: int = 0) -> Any:
        return json.loads(self.muster("--context", "desk", *words, "--json", expect=expect).stdout)

    def allow(self, role: str) -> None:
        """The chart's role, as an administrator binds it."""
        name = f"{self.account}-{role}"
        self.house.apply({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": name, "namespace": "team"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": self.account, "namespace": "team"}],
        })  # fmt: skip

    def job_file(self, name: str, **changes: Any) -> str:
        document = quick_job(name, **changes)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return str(path)


@pytest.fixture(scope="module")
def desk(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    for index in range(2):
        house.node(f"desk-{index}", {"node.kubernetes.io/instance-type": "desk"})
    house.start_operator()
    desk = Desk(house, tmp_path_factory.mktemp("desk"), "ann")
    desk.allow("edit")
    house.apply({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": "jobs", "namespace": "team"},
        "rules": [
            {"apiGroups": ["muster.dev"], "resources": ["trainingjobs"],
             "verbs": ["get", "list", "watch", "create", "patch", "delete"]},
        ],
    })  # fmt: skip
    house.apply({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "ann-jobs", "namespace": "team"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "jobs"},
        "subjects": [{"kind": "ServiceAccount", "name": "ann", "namespace": "team"}],
    })  # fmt: skip
    yield desk
    house.stop_operators()


def on_desk(**gang: Any) -> dict[str, Any]:
    return {"instanceTypes": ["desk"], **gang}


def test_a_job_from_its_file_to_its_end(desk: Desk) -> None:
    file = desk.job_file("cli-plain", steps=10, gang=on_desk())
    plan = desk.ask("submit", file, "--dry-run")
    assert (plan["accepted"], plan["worldSize"]) == (True, {"min": 2, "max": 2})
    assert plan["admission"]["verdict"] == "unknown", "who would make room is not a cluster's to say"
    assert desk.house.find(paths.job("team", "cli-plain")) is None, "a dry run stores nothing"
    followed = desk.muster("--context", "desk", "submit", file, "--yes", "--follow", "--json")
    lines = [json.loads(line) for line in followed.stdout.splitlines()]
    assert lines[-1]["status"]["phase"] == "Succeeded"
    assert "cli-plain succeeded" in followed.stderr

    # Other tests' jobs of this cluster may be listed, too.
    assert "cli-plain" in [job["name"] for job in desk.ask("ls", "--phase", "succeeded")["items"]]
    table = desk.muster("--context", "desk", "ls").stdout.splitlines()
    assert ["cli-plain", "Succeeded"] in [line.split()[:2] for line in table]
    shown = desk.muster("--context", "desk", "get", "cli-plain").stdout
    assert "GOODPUT" in shown
    assert desk.ask("get", lines[-1]["id"])["metadata"]["name"] == "cli-plain", "by its id too"
    folder = lines[-1]["status"]["checkpoint"]["uri"]
    assert desk.ask("why", "cli-plain")["next"] == [
        f"The job is done. Try the model: `muster chat {folder}`. Export it: `muster export {folder} --to FOLDER`.",
        f"`muster checkpoints ls {folder}` lists its checkpoints.",
    ]
    events = desk.ask("events", "cli-plain")["items"]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert {"CreatingWorkers", "Finished"} <= {event["type"] for event in events}
    streamed = desk.muster("--context", "desk", "events", "cli-plain", "--follow", "--json").stdout.splitlines()
    assert [json.loads(line)["type"] for line in streamed] == [event["type"] for event in events]


def test_a_running_job_is_read_stopped_and_let_go_on(desk: Desk) -> None:
    desk.ask("submit", desk.job_file("cli-long", steps=100_000, gang=on_desk()))
    desk.house.reaches("cli-long", "Running")
    desk.house.steps("cli-long", 5)
    logs = eventually(lambda: desk.ask("logs", "cli-long", "--worker", "all"), "logs of both workers")
    assert [page["worker"] for page in logs["items"]] == [0, 1]
    assert desk.ask("suspend", "cli-long", "--wait")["status"]["phase"] == "Suspended"
    assert desk.ask("why", "cli-long")["next"][0].startswith("Continue the job when you are ready")
    assert desk.ask("resume", "cli-long", "--wait")["status"]["phase"] == "Running"
    assert desk.ask("cancel", "cli-long", "--wait")["status"]["phase"] == "Cancelled"
    refused = desk.ask("suspend", "cli-long", expect=1)["error"]
    assert refused["message"] == "cli-long has ended (Cancelled), so it can't suspend"


def test_what_is_wrong_is_said(desk: Desk) -> None:
    def error(*words: str, expect: int) -> dict[str, Any]:
        told: dict[str, Any] = desk.ask(*words, expect=expect)["error"]
        return told

    assert error("get", "nobody", expect=1)["code"] == "job_not_found"
    assert "is not one of Queued" in error("ls", "--phase", "runing", expect=2)["message"]
    bad = desk.job_file("cli-bad", trainig={"x": 1})
    (problem,) = error("submit", bad, "--yes", expect=2)["problems"]
    assert (problem["path"], problem["didYouMean"]) == ("spec.trainig", "training")
    assert problem["line"] is not None
    assert error("tokens", "ls", expect=2)["code"] == "needs-api"
    (desk.folder / "other").mkdir()
    stranger = Desk(desk.house, desk.folder / "other", "stranger")
    told = stranger.ask("ls", expect=1)["error"]
    assert told["code"] == "kubernetes-403"
    assert told["next"] == "`muster doctor --context desk` lists the rights that are missing"
    nearly = stranger.muster("--context", "dsk", "ls", expect=2).stderr
    assert "the kubeconfig has no context 'dsk'" in nearly
    assert "did you mean 'desk'?" in nearly


def lines(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {finding["check"]: (finding["state"], finding["message"]) for finding in document["findings"]}


def test_the_doctor_sees_what_is_there_and_what_is_not(desk: Desk) -> None:
    """As an administrator, who may ask for other people's rights; nothing runs the operator's Deployment here."""
    kubeconfig, desk.kubeconfig = desk.kubeconfig, desk.house.plane.kubeconfig
    try:
        found = json.loads(desk.muster("doctor", "--context", "it", "--json", expect=1).stdout)
        seen = lines(found)
        assert not found["ready"]
        assert seen["kubernetes"][0] == "ok"
        assert seen["definition"] == ("ok", "trainingjobs.muster.dev v1alpha1, as this Muster has it")
        assert seen["operator's rights"] == (
            "ok",
            f"system:serviceaccount:{SYSTEM}:muster-operator may do what it must",
        )
        assert seen["operator"] == ("failure", f"no Deployment muster-operator in namespace {SYSTEM}")
        assert seen["agents"][0] == "warning"
        assert seen["checkpoint store"][0] == "warning"
        assert all(finding["next"] for finding in found["findings"] if finding["state"] != "ok")

        _install_deployment(desk.house)
        table = desk.muster("doctor", "--context", "it", expect=1).stdout
        assert "none of 1 replica is ready, muster:test" in table
        assert f"next: kubectl -n {SYSTEM} describe deployment muster-operator" in table
    finally:
        desk.kubeconfig = kubeconfig


def _install_deployment(house: House) -> None:
    """The operator's Deployment with an image that no hollow node has."""
    labels = {"app": "muster-operator"}
    container = {"name": "operator", "image": "muster:test"}
    house.apply({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "muster-operator", "namespace": SYSTEM},
        "spec": {
            "replicas": 1, "paused": True, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    })  # fmt: skip


def test_the_doctor_names_the_rights_that_are_missing(desk: Desk) -> None:
    (desk.folder / "third").mkdir()
    stranger = Desk(desk.house, desk.folder / "third", "third")
    found = json.loads(stranger.muster("doctor", "--context", "desk", "--json", expect=1).stdout)
    state, message = lines(found)["your rights"]
    assert state == "failure"
    assert message.startswith("you may not get, list, watch, create, patch trainingjobs.muster.dev; get, list pods")
    assert lines(found)["operator's rights"][0] == "warning", "who may not ask for others is told so"
    own = json.loads(desk.muster("doctor", "--context", "desk", "--json").stdout)
    assert lines(own)["your rights"] == ("ok", "you may submit, watch and change jobs in namespace team")


def test_the_chart_has_what_the_doctor_looks_for() -> None:
    """Names of the installation that the doctor knows: a chart that renames them must be noticed here."""
    operator, agent = ((CHART / "templates" / f"{name}.yaml").read_text() for name in ("operator", "agent"))
    for word in ("muster-operator", "MUSTER_OPERATOR_IMAGE", "MUSTER_OPERATOR_CHECKPOINT_URI"):
        assert word in operator
    assert "name: muster-agent" in agent
