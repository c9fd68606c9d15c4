"""A real Prometheus scrapes a real `muster up` with a job that was hurt once: every panel and rule gets an answer."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tests.integration.cli.house import House
from tests.integration.monitoring.servers import Prometheus, needs_prometheus
from tests.polling import eventually
from tests.ports import free_port
from tests.tidy.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900), needs_prometheus]

CHART = ROOT / "helm" / "muster"
# Queries about what this machine does not have: they must be well-formed, and have nothing to say.
ABSENT = {
    "muster_agent_notices": "no node agent runs under this test",
    "muster_agent_source_age_seconds": "no node agent runs under this test",
    "muster_operator_api_calls_total": "there is no Kubernetes",
    "muster_operator_pass_failures_total": "no pass failed",
    "muster_trainer_straggler_ratio": "no rank is slow",
    "muster_operator_job_gpu_seconds": "the workers have no GPUs",
    'muster_operator_job_phase{phase="Queued"}': "nobody waits",
    "muster_api_project_unpriced_hours": "every node has a price",
    "muster_api_project_budget_ratio": "no project has a budget",
    "muster_api_webhook_attempts_total": "no project has a webhook",
    "muster_trainer_objective": "pretraining has a loss and no further values",
    "muster_trainer_evaluation_objective": "pretraining has a loss and no further values",
}


class Watched:
    """`muster up` with one job, and Prometheus beside it."""

    def __init__(self, house: House, prometheus: Prometheus, operator: str, uid: str) -> None:
        self.house, self.prometheus, self.operator, self.uid = house, prometheus, operator, uid

    def ask(self, query: str) -> list[dict[str, Any]]:
        query = query.replace("$job", self.uid).replace("$__rate_interval", "30s")
        try:
            return self.prometheus.query(query)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{query}: {error.read().decode()}") from None


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "house").mkdir()
    house, prometheus, port = House(folder / "house"), Prometheus(folder), free_port()
    prices = folder / "prices.json"
    prices.write_text(json.dumps({"types": {"*": {"onDemand": 36_000.0}}}))
    house.environ |= {f"MUSTER_{part}_PRICES_FILE": str(prices) for part in ("OPERATOR", "API")}
    house.environ["MUSTER_API_METRICS_PUBLIC"] = "true"  # what projects spend, to a Prometheus without a token
    try:
        house.up("--operator-port", str(port), "--prometheus-url", prometheus.url)
        operator = f"127.0.0.1:{port}"
        api = house.url.removeprefix("http://")
        prometheus.run({"/metrics": operator, "/metrics/ranks": operator}, CHART / "files" / "alerts.yaml", api=api)
        house.muster("submit", str(house.job_file("hurt", length={"steps": 1_000_000})))
        house.wait_for_step("hurt", 10)
        uid = house.ask("get", "hurt")["id"]
        psutil.Process(house.beats(uid)[0].pid).send_signal(signal.SIGKILL)
        eventually(lambda: house.ask("get", "hurt")["status"]["attempt"] == 2, "the second attempt")
        eventually(lambda: any(b.attempt == 2 and b.step >= 20 for b in house.beats(uid)), "it to train on")
        yield Watched(house, prometheus, operator, uid)
    finally:
        prometheus.kill()
        house.close()


def panels() -> dict[str, str]:
    found = {}
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found |= {f"{path.stem}: {panel['title']} {t['refId']}": t["expr"] for t in panel["targets"]}
    return found


def test_every_panel_has_data_or_a_reason_to_have_none(watched: Watched) -> None:
    post_an_alert(watched)
    silent = {}
    for place, query in panels().items():
        reason = next((why for words, why in ABSENT.items() if words in query), "")
        if reason:
            watched.ask(query)  # it must be well-formed all the same
            continue
        try:
            eventually(lambda query=query: watched.ask(query), place)  # type: ignore[misc]
        except AssertionError:
            silent[place] = query
    assert not silent


def post_an_alert(watched: Watched) -> None:
    token = (watched.house.state.root / "webhook-token").read_text().strip()
    alert = {"labels": {}, "status": "firing", "startsAt": "2026-01-01T00:00:00Z", "fingerprint": "1"}
    request = urllib.request.Request(
        f"http://{watched.operator}/alerts",
        json.dumps({"alerts": [alert]}).encode(),
        {"Authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply) == {"no_action": 1}


def test_every_rule_is_well_in_prometheus_and_no_alert_fires(watched: Watched) -> None:
    def evaluated() -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{watched.prometheus.url}/api/v1/rules") as reply:
            rules = [rule for group in json.load(reply)["data"]["groups"] for rule in group["rules"]]
        assert all(rule["health"] == "ok" for rule in rules), [rule for rule in rules if rule["health"] != "ok"]
        return rules

    rules = eventually(evaluated, "all rules to have been evaluated")
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    assert len(rules) == sum(len(group["rules"]) for group in groups)
    assert watched.ask('ALERTS{alertstate="firing"}') == []
    eventually(lambda: watched.ask("muster:job_idle_seconds"), "a gang at its steps")
    assert watched.ask("muster:job_goodput_ratio")


def test_every_metric_that_is_asked_for_is_served_by_a_running_program(watched: Watched) -> None:
    served = set()
    operator = f"http://{watched.operator}/metrics"
    for address in (operator, f"{operator}/ranks", f"{watched.house.url}/metrics"):
        served |= set(re.findall(r"^# TYPE (\S+)", fetch(address), re.MULTILINE))
    asked = {name for query in panels().values() for name in re.findall(r"muster_(?!agent)[a-z]+_[a-z_]+", query)}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert bare - served <= {"muster_operator_api_calls_total"}


def test_ranks_are_scraped_at_one_known_address(watched: Watched) -> None:
    found = watched.ask("muster_trainer_last_step_timestamp_seconds")
    assert {entry["metric"]["rank"] for entry in found} == {"0", "1"}
    for entry in found:
        labels = entry["metric"]
        assert (labels["job_uid"], labels["job_name"], labels["attempt"]) == (watched.uid, "hurt", "2")


def test_money_is_told_everywhere(watched: Watched, tmp_path: Path) -> None:
    """36,000 a node and hour: ten a second."""
    house = watched.house
    job = house.ask("get", "hurt")
    assert job["cost"]["nodeHours"] > 0
    assert job["cost"]["cost"] == pytest.approx(job["cost"]["nodeHours"] * 36_000)
    assert job["cost"]["gaps"] == []
    token = house.state.admin_token.read_text().strip()
    history = json.loads(fetch(f"{house.url}/api/v1/jobs/{watched.uid}/attempts", {"Authorization": f"Bearer {token}"}))
    assert [cost["nodeHours"] > 0 for cost in history["costs"]] == [True, True]
    assert history["cost"]["cost"] == pytest.approx(sum(cost["cost"] for cost in history["costs"]))
    shown = house.muster("get", "hurt").stdout
    assert re.search(r"^cost +[\d,.]+ USD; [\d.]+ node-hours *$", shown, re.MULTILINE), shown
    (told,) = watched.ask("muster_operator_job_cost_dollars")
    assert float(told["value"][1]) > 0


def fetch(address: str, headers: dict[str, str] | None = None) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers or {})) as reply:
        body: bytes = reply.read()
    return body.decode()
