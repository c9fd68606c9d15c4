"""Alerts and dashboards ask for metrics that exist, with the labels that they have, in words that Prometheus knows."""

import json
import re
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.tidy.repository import ROOT
from tests.unit.core.seen import NOW, beat, running
from tests.unit.packaging.chart import CHART, Chart
from tests.unit.packaging.conftest import tool
from tests.unit.packaging.value_sets import MONITORED

from muster.agent.gpus import GpuReading
from muster.agent.metrics import _GPU
from muster.agent.metrics import AgentMetrics as AgentMetrics
from muster.api.core.observability import ApiMetrics as ApiMetrics
from muster.documents.prices import load_prices
from muster.operator.core.fleet import JobSummary
from muster.operator.metrics import OperatorMetrics as OperatorMetrics
from muster.trainer.train.metrics import RankMetrics as TrainerMetrics
from muster.words.signals import TrainerPhase
from muster.words.status import Cause, CheckpointStatus, GoodputAccount, GoodputState, Phase, Progress, Restarts

ALERTS = CHART / "files" / "alerts.yaml"
NAME = re.compile(r"muster_[a-z]+_[a-z_]+|muster:\w+")
GROUPED = re.compile(r"(?:by|on) \(([a-z_, ]+)\)")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Of alerts and panels, by where they stand."""
    found = {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found |= {f"{path.name}: {panel['title']} {t['refId']}": t["expr"] for t in panel["targets"]}
    return found


def a_job() -> JobSummary:
    """One of which everything is known that can be."""
    seen = running()
    progress = Progress(at=NOW, step=3, loss=1.0, tokens_per_second=2.0, mfu=0.4)
    status = seen.status.model_copy(
        update={
            "progress": progress,
            "checkpoint": CheckpointStatus(step=3, committed_at=NOW, uri="s3://x"),
            "restarts": Restarts(total=1, by_cause={"hang": 1}),
            "ledger": GoodputAccount(seconds={"productive": 1.0}, since=NOW),
        }
    )
    return JobSummary(seen.uid, "team", "job", NOW, False, seen.spec, status)


def agent_metrics() -> AgentMetrics:
    """Of a machine that has everything."""
    values = {(name, label): 1.0 for name, (_, label) in _GPU.items()}
    machine: dict[str, Any] = {
        "gpus": SimpleNamespace(readings=(GpuReading(0, "device", "uuid", values=values),)),
        "xids": SimpleNamespace(counts={("device", 79): 1}),
        "fabric": SimpleNamespace(counters={("device", "1", "name"): 1.0}, links={"eth0": True}),
        "disks": SimpleNamespace(
            spaces={"/": SimpleNamespace(bytes_free=1, bytes_total=1, inodes_free=1, read_only=False)}
        ),
    }
    notices: Any = SimpleNamespace(notices=(SimpleNamespace(kind="spot", remedy="drain", source="imds"),))
    return AgentMetrics(lambda: notices, lambda: {"imds": 0.5}, **machine)


def metrics() -> dict[str, tuple[str, ...]]:
    """Series name → labels, of the programs' own registries, of recording rules, and of what scraping adds."""
    operator = OperatorMetrics()
    operator.show_jobs(lambda: {"Running": 1}, lambda: [a_job()], load_prices())
    trainer = TrainerMetrics(0, lambda: beat(1, 5))
    # Registered by the Kubernetes world, where a client is needed to make it.
    found: dict[str, tuple[str, ...]] = {"muster_operator_api_calls_total": ("verb", "resource")}
    api = ApiMetrics()
    for registry in (operator.registry, api.registry, api.of_projects, trainer.registry, agent_metrics()._registry):
        for collector in registry._collector_to_names:
            if (name := getattr(collector, "_name", None)) is not None:
                labels = tuple(collector._labelnames)  # type: ignore[attr-defined]
                series = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(
                    collector._type,  # type: ignore[attr-defined]
                    ("",),
                )
                found |= {name + suffix: (*labels, "le") if suffix == "_bucket" else labels for suffix in series}
        found |= {sample.name: tuple(sample.labels) for family in registry.collect() for sample in family.samples}
    page = operator.page().body.decode()
    found |= {s.name: tuple(s.labels) for family in text_string_to_metric_families(page) for s in family.samples}
    place = ("job_uid", "job_name", "job_namespace", "attempt", "worker", "rank")
    added = {"trainer": place, "agent": ("node",)}
    found = {name: (*labels, *added.get(name.split("_")[1], ())) for name, labels in found.items()}
    return found | {rule["record"]: place for rule in rules() if "record" in rule}


def test_memory_and_version_of_operator_and_api_are_told() -> None:
    """A leak or a replica of another version was not to be seen."""
    page = OperatorMetrics().page().body.decode() + generate_latest(ApiMetrics("1.2.3").registry).decode()
    assert page.count("\nprocess_resident_memory_bytes ") == page.count("\nprocess_cpu_seconds_total ") == 2
    assert f'muster_operator_build_info{{version="{version("muster-train")}"}} 1.0' in page
    assert 'muster_api_build_info{version="1.2.3"} 1.0' in page


def test_every_query_asks_for_what_there_is() -> None:
    known = metrics()
    asked = queries()
    assert len(asked) > 25
    for place, query in asked.items():
        names = set(NAME.findall(query))
        assert names, place
        assert names <= set(known), f"{place}: no metric {', '.join(sorted(names - set(known)))}"
        labels = {label for name in names for label in known[name]}
        wanted = {word for group in GROUPED.findall(query) for word in group.split(", ")}
        wanted |= set(re.findall(r'(\w+)(?==~?"|!=?~?")', query))
        assert wanted <= labels, f"{place}: no label {', '.join(sorted(wanted - labels))}"


def test_phases_causes_and_states_in_queries_exist() -> None:
    words = {
        "phase": {str(phase) for phase in (*Phase, *TrainerPhase)},
        "cause": {str(cause) for cause in Cause},
        "state": {str(state) for state in GoodputState},
    }
    seen = 0
    for place, query in queries().items():
        for label, pattern in re.findall(r'(phase|cause|state)(?:=|!=|=~|!~)"([^"]+)"', query):
            assert set(pattern.split("|")) <= words[label], place
            seen += 1
    assert seen > 4


def test_the_chart_says_where_the_runbooks_are(chart: Chart) -> None:
    rule = chart.find(MONITORED, "PrometheusRule", "muster")
    installed = [r for group in rule["spec"]["groups"] for r in group["rules"] if "alert" in r]
    addresses = [r["annotations"]["runbook_url"] for r in installed]
    assert len(addresses) == len([r for r in rules() if "alert" in r])
    assert all(re.fullmatch(r"https://runbooks\.example\.com/Muster\w+", address) for address in addresses)
    texts = [r["annotations"]["summary"] for r in installed]
    assert any("{{ $labels.cause }}" in text for text in texts), "Prometheus' own templates must survive helm"


def test_dashboards_are_what_their_script_writes(chart: Chart) -> None:
    assert tool("generate_dashboards").main(["--check"]) == 0
    for path in (CHART / "dashboards").glob("*.json"):
        item = chart.find(MONITORED, "ConfigMap", f"muster-dashboard-{path.stem}")
        assert item["data"] == {path.name: path.read_text()}
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_dashboard_of_a_job_leads_to_it_in_muster(chart: Chart) -> None:
    """Prometheus has no texts: the samples that a job generated are shown there."""
    values = {**MONITORED, "api": {**MONITORED.get("api", {}), "publicUrl": "https://muster.example.com/"}}
    item = chart.find(values, "ConfigMap", "muster-dashboard-job")
    shown = json.loads(item["data"]["job.json"])
    assert [link["url"] for link in shown["links"]] == ["${muster}/jobs?q=${job:text}"]
    variables = {each["name"]: each for each in shown["templating"]["list"]}
    assert variables["muster"]["query"] == variables["muster"]["current"]["value"] == "https://muster.example.com"
    assert "job" in variables


def test_the_manual_leads_to_the_runbooks() -> None:
    assert "(runbooks.md)" in (ROOT / "docs" / "operations.md").read_text()
