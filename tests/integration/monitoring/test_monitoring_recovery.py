"""With the real Prometheus and Alertmanager: their alerts restart a gang, and nobody needs them in order to recover."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.integration.local.house import House
from tests.integration.monitoring.servers import Alertmanager, Prometheus, needs_both, needs_prometheus
from tests.polling import eventually

from muster.words.status import Phase

pytestmark = pytest.mark.slow

HOLDS_AT = 8  # attempt 1 stands still there, and only there
STALLED = {
    "groups": [
        {
            "name": "test",
            "rules": [
                {
                    "alert": "GangStalled",
                    "expr": "time() - muster_operator_job_last_step_timestamp_seconds > 15",
                    "labels": {"muster_action": "restart"},
                    "annotations": {"summary": "no step for {{ $value | humanizeDuration }}"},
                }
            ],
        }
    ]
}


def url(house: House) -> str:
    path = house.state.root / "operator.json"

    def told() -> str:
        return str(json.loads(path.read_text()).get("url", "")) if path.exists() and path.read_text() else ""

    return eventually(told, "the operator to tell its address")


def counted(house: House, series: str) -> float:
    with urllib.request.urlopen(f"{url(house)}/metrics") as reply:
        page = reply.read().decode()
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def targets(house: House) -> dict[str, str]:
    return {"/metrics": urlsplit(url(house)).netloc}


def restarted_by_the_alert(house: House, uid: str) -> Any:
    status = house.becomes(uid, Phase.SUCCEEDED)
    assert (status.attempt, status.restarts.by_cause) == (2, {"hang": 1})
    assert house.never_two(uid)
    failure = status.last_failure
    assert failure is not None
    assert (failure.cause, failure.attempt) == ("hang", 1)
    return failure


@needs_both
def test_a_stall_alert_restarts_the_gang(house: House, prometheus: Prometheus, alertmanager: Alertmanager) -> None:
    house.start()
    alertmanager.run(f"{url(house)}/alerts", house.state.root / "webhook-token")
    prometheus.run(targets(house), STALLED, alertmanager)
    uid = house.submit(env={"FAKE_HOLD_AT": str(HOLDS_AT)})
    failure = restarted_by_the_alert(house, uid)
    assert failure.message.startswith("GangStalled: no step for "), failure.message
    assert counted(house, 'muster_operator_alerts_total{outcome="taken"}') >= 1
    # Nobody steps any more, so the rule goes on about a job that is over.
    eventually(lambda: counted(house, 'muster_operator_alerts_total{outcome="job_gone"}'), "the alert to be ignored")
    assert house.status(uid).attempt == 2


@needs_prometheus
@pytest.mark.long
def test_an_alert_is_read_from_prometheus_where_no_alertmanager_is(house: House, prometheus: Prometheus) -> None:
    house.start("--prometheus-url", prometheus.url)
    prometheus.run(targets(house), STALLED)
    uid = house.submit(env={"FAKE_HOLD_AT": str(HOLDS_AT)})
    failure = restarted_by_the_alert(house, uid)
    assert failure.message == "GangStalled: holds in Prometheus"


@needs_prometheus
@pytest.mark.long
def test_a_job_survives_prometheus_being_killed_for_the_whole_recovery(house: House, prometheus: Prometheus) -> None:
    answered, failed = (
        f'muster_operator_prometheus_queries_total{{outcome="{word}"}}' for word in ("answered", "failed")
    )
    house.start("--prometheus-url", prometheus.url)
    prometheus.run(targets(house))
    uid = house.submit(env={"FAKE_HOLD_AT": str(HOLDS_AT)})
    house.stands_at(uid, HOLDS_AT)
    eventually(lambda: counted(house, answered), "Prometheus to have been asked")
    prometheus.kill()
    gone_at = counted(house, failed)
    (launcher, *ranks) = house.trees(uid)[1, 1]
    ranks[0].send_signal(signal.SIGKILL)
    status = house.becomes(uid, Phase.SUCCEEDED)
    assert (status.attempt, status.restarts.total) == (2, 1), launcher
    eventually(lambda: counted(house, failed) > gone_at, "the operator to notice that nobody answers")
    before = counted(house, answered)
    prometheus.run(targets(house))
    eventually(lambda: counted(house, answered) > before, "Prometheus to be asked again")


@pytest.mark.long
@pytest.mark.parametrize(("action", "cause"), [("exclude-node", "infrastructure"), ("drain", "eviction")])
def test_an_alert_about_a_node_restarts_the_gang(house: House, action: str, cause: str) -> None:
    house.start()
    uid = house.submit(env={"FAKE_HOLD_AT": str(HOLDS_AT)})
    house.stands_at(uid, HOLDS_AT)
    node = house.status(uid).gang.nodes[1]
    labels = {"alertname": "NodeIsIll", "muster_action": action, "job_uid": uid, "attempt": "1", "node": node}
    alert = {"labels": labels, "status": "firing", "startsAt": "2026-01-01T00:00:00Z", "fingerprint": "f"}
    request = urllib.request.Request(f"{url(house)}/alerts", json.dumps({"alerts": [alert]}).encode())
    token = (house.state.root / "webhook-token").read_text().strip()
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply) == {"taken": 1}
    status = house.becomes(uid, Phase.SUCCEEDED)
    assert (status.attempt, status.restarts.by_cause) == (2, {cause: 1})
    assert node not in status.attempts[-1].nodes
    assert house.never_two(uid)
