"""The node agent's DaemonSet: privileged where it must be, and nowhere else; its settings reach the process."""

import json
from pathlib import Path

import pytest
from tests.unit.packaging.chart import Chart, Refused, environment, pod_specs
from tests.unit.packaging.value_sets import EVERYTHING

from muster.agent.settings import PREFIX, Settings, read
from muster.agent.xid import read_table
from muster.words.notices import AGENT_PORT, Remedy

ON = {"agent": {"enabled": True}}


def test_no_agent_unless_it_is_asked_for(chart: Chart) -> None:
    assert [item["metadata"]["name"] for item in chart.objects({}) if item["metadata"]["name"] == "muster-agent"] == []
    (operator,) = pod_specs(chart.objects({}))["muster-operator"]["containers"]
    assert "MUSTER_OPERATOR_AGENT_PORT" not in environment(operator)


def test_what_it_may_do_on_the_node(chart: Chart) -> None:
    """Privileged for /dev/kmsg; the host's network for a metadata service with a hop limit of 1. Nothing of the host
    can be written to, no process of it be seen.
    """
    spec = pod_specs(chart.objects(ON))["muster-agent"]
    (container,) = spec["containers"]
    assert container["securityContext"]["privileged"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["hostNetwork"] is True
    assert not {"hostPID", "hostIPC"} & set(spec)
    paths = [volume["hostPath"] for volume in spec["volumes"] if "hostPath" in volume]
    assert paths == [{"path": "/dev/kmsg", "type": "CharDevice"}]
    mounts = {mount["name"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts == {"kernel-log": True, "tmp": False}


def test_what_it_may_do_in_the_cluster(chart: Chart) -> None:
    rules = chart.find(ON, "ClusterRole", "muster-agent")["rules"]
    assert [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in rules] == [
        ([""], ["nodes"], ["get", "patch"]),
        ([""], ["nodes/status"], ["patch"]),
    ]


def test_it_reads_its_settings_as_meant(chart: Chart) -> None:
    (container,) = pod_specs(chart.objects(EVERYTHING))["muster-agent"]["containers"]
    told = environment(container) | {f"{PREFIX}NODE": "node-1"}
    known = {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
    assert {name for name in told if name.startswith("MUSTER_")} <= known, "others would be ignored"
    settings = read({}, told)
    assert (settings.node, settings.port, settings.kubernetes) == ("node-1", AGENT_PORT, True)
    assert settings.imds == "http://169.254.169.254"
    assert settings.xid_table == Path("/etc/muster/xid.json")
    (plain,) = pod_specs(chart.objects(ON))["muster-agent"]["containers"]
    assert read({}, environment(plain) | {f"{PREFIX}NODE": "n"}).xid_table is None


def test_the_table_in_the_values_is_one_that_the_agent_reads(chart: Chart, tmp_path: Path) -> None:
    data = chart.find(EVERYTHING, "ConfigMap", "muster-agent")["data"]
    (tmp_path / "xid.json").write_text(data["xid.json"])
    assert read_table(tmp_path / "xid.json")[63].remedy is Remedy.DRAIN
    assert json.loads(data["xid.json"]) == EVERYTHING["agent"]["xidTable"]


@pytest.mark.parametrize(
    "table", [{"63": {"remedy": "pray"}}, {"sixty": {"remedy": "reset"}}, {"63": {"action": "reset"}}]
)
def test_a_table_that_the_agent_would_refuse_is_refused_first(chart: Chart, table: dict[str, object]) -> None:
    with pytest.raises(Refused, match="/agent/xidTable"):
        chart.text({"agent": {"enabled": True, "xidTable": table}})


def test_the_operator_tells_workers_the_same_port(chart: Chart) -> None:
    objects = chart.objects({"agent": {"enabled": True, "port": 30_000}})
    (operator,) = pod_specs(objects)["muster-operator"]["containers"]
    (agent,) = pod_specs(objects)["muster-agent"]["containers"]
    assert environment(operator)["MUSTER_OPERATOR_AGENT_PORT"] == environment(agent)["MUSTER_AGENT_PORT"] == "30000"
