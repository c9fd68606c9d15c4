"""Alerts and dashboards ask for metrics that exist, with the labels that they have, in words that Prometheus knows."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.tidy.repository import ROOT
from tests.unit.packaging.chart import CHART, Chart
from tests.unit.packaging.conftest import tool
from tests.unit.packaging.value_sets import MONITORED

from muster.api.observability import Metrics as ApiMetrics
from muster.contract.status import Cause, Phase
from muster.operator.metrics import Metrics as OperatorMetrics

ALERTS = CHART / "files" / "alerts.yaml"
NAME = re.compile(r"muster_[a-z]+_[a-z_]+")
GROUPED = re.compile(r"by \(([a-z, ]+)\)")
PROMTOOL = shutil.which("promtool")


def queries() -> dict[str, str]:
    """Of alerts and panels, by where they stand."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found |= {f"{path.name}: {panel['title']} {t['refId']}": t["expr"] for t in panel["targets"]}
    return found


def metrics() -> dict[str, tuple[str, ...]]:
    """Series name → labels, of the programs' own registries."""
    operator = OperatorMetrics()
    operator.show_jobs(dict)
    # Registered by the Kubernetes world, where a client is needed to make it.
    found = {"muster_operator_api_calls_total": ("verb",), "muster_operator_jobs": ("phase",)}
    for registry in (operator.registry, ApiMetrics().registry):
        for collector in registry._collector_to_names:
            if (name := getattr(collector, "_name", None)) is not None:
                labels = tuple(collector._labelnames)
                series = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(
                    collector._type, ("",)
                )
                found |= {name + suffix: (*labels, "le") if suffix == "_bucket" else labels for suffix in series}
    return found


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


def test_phases_and_causes_in_queries_exist() -> None:
    words = {"phase": {str(phase) for phase in Phase}, "cause": {str(cause) for cause in Cause}}
    seen = 0
    for place, query in queries().items():
        for label, pattern in re.findall(r'(phase|cause)(?:=|!=|=~|!~)"([^"]+)"', query):
            assert set(pattern.split("|")) <= words[label], place
            seen += 1
    assert seen > 4


def test_every_alert_tells_what_to_do() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            name, notes = rule["alert"], rule["annotations"]
            assert set(notes) == {"summary", "description", "runbook_url"}, name
            assert notes["runbook_url"] == f"RUNBOOKS/{name}", name
            assert rule["labels"]["severity"] in ("critical", "warning"), name


def test_the_chart_says_where_the_runbooks_are(chart: Chart) -> None:
    rule = chart.find(MONITORED, "PrometheusRule", "muster")
    addresses = [r["annotations"]["runbook_url"] for group in rule["spec"]["groups"] for r in group["rules"]]
    assert len(addresses) == len(yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]) + 4
    assert all(re.fullmatch(r"https://runbooks\.example\.com/Muster\w+", address) for address in addresses)
    texts = [r["annotations"]["summary"] for group in rule["spec"]["groups"] for r in group["rules"]]
    assert any("{{ $labels.cause }}" in text for text in texts), "Prometheus' own templates must survive helm"


def test_dashboards_are_what_their_script_writes(chart: Chart) -> None:
    assert tool("generate_dashboards").main(["--check"]) == 0
    for path in (CHART / "dashboards").glob("*.json"):
        item = chart.find(MONITORED, "ConfigMap", f"muster-dashboard-{path.stem}")
        assert item["data"] == {path.name: path.read_text()}
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_accepts_the_rules() -> None:
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", ALERTS], check=True, capture_output=True)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    """Time series made up, judged by Prometheus itself."""
    assert PROMTOOL is not None
    well = {
        "muster_operator_status_writes_total": "0+10x120",
        'muster_operator_decisions_total{code="running"}': "0+10x120",
        'muster_operator_api_calls_total{verb="PUT"}': "0+20x120",
        'muster_operator_jobs{phase="Running"}': "3x120",
    }
    storm = {'muster_operator_restarts_total{cause="preemption"}': "0x30 20x90"}
    stuck = {
        'muster_operator_decisions_total{code="running"}': "5x120",
        'muster_operator_api_calls_total{verb="PUT"}': "5x120",
    }
    ill = {
        'muster_api_requests_total{status="200"}': "0+60x120",
        'muster_api_requests_total{status="503"}': "0+60x120",
    }
    cases: list[tuple[str, dict[str, str], str, set[str]]] = [
        ("nothing is scraped", {}, "10m", {"MusterOperatorDown"}),
        ("not yet for long enough", {}, "4m", set()),
        ("all is well", well, "90m", set()),
        ("spot nodes go", well | storm, "35m", {"MusterPreemptionStorm"}),
        ("nobody leads", well | stuck, "90m", {"MusterLeaderMissing", "MusterOperatorIdle"}),
        ("the database is down", well | ill, "60m", {"MusterApiErrors"}),
    ]
    names = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    document = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "name": case,
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{name}"}})',
                        "eval_time": at,
                        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name in firing else [],
                    }
                    for name in names
                ],
            }
            for case, series, at, firing in cases
        ],
    }
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_line_in_the_operations_manual() -> None:
    rules = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    manual = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^\| (Muster\w+) \|", manual, re.MULTILINE) == rules
