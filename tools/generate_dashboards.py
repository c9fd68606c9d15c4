"""Write the Grafana dashboards of chart and compose, or with --check say whether they are what this script writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "helm" / "muster" / "dashboards"
WIDTH, HEIGHT = 12, 8  # of a panel; a row has 24 columns
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """queries: (PromQL, legend). unit: as Grafana calls it."""

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False


def quantiles(histogram: str, window: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket[{window}])))", f"p{q * 100:.0f}")
        for q in (0.5, 0.9, 0.99)
    )


FLEET = (
    Panel(
        "Jobs by phase", "What the operator has to look after.",
        (("sum by (phase) (muster_operator_jobs)", "{{phase}}"),), stacked=True,
    ),
    Panel("Nodes reserved", "By gangs, in the operator's ledger.", (("sum(muster_operator_reserved_nodes)", "nodes"),)),
    Panel(
        "Restarts by cause", "Per hour. Preemption and eviction cost the user's budget nothing.",
        (("sum by (cause) (increase(muster_operator_restarts_total[1h]))", "{{cause}}"),), stacked=True,
    ),
    Panel(
        "Recovery", "From a failure to the next attempt's first step.",
        quantiles("muster_operator_recovery_seconds", "1h"), "s",
    ),
    Panel(
        "Jobs finished", "Per hour, by how they ended.",
        (("sum by (phase) (increase(muster_operator_jobs_finished_total[1h]))", "{{phase}}"),), stacked=True,
    ),
    Panel("Attempts begun", "Per hour.", (("sum(increase(muster_operator_attempts_total[1h]))", "attempts"),)),
)  # fmt: skip
CONTROL_PLANE = (
    Panel(
        "Decisions", "Per second, by their code.",
        ((f"sum by (code) (rate(muster_operator_decisions_total[{RATE}]))", "{{code}}"),), "ops",
    ),
    Panel(
        "Actions and status writes", "Per second.",
        (
            (f"sum by (action) (rate(muster_operator_actions_total[{RATE}]))", "{{action}}"),
            (f"sum(rate(muster_operator_status_writes_total[{RATE}]))", "status"),
        ), "ops",
    ),
    Panel(
        "Passes that failed", "Per second, by the error's type. Each is tried again.",
        ((f"sum by (error) (rate(muster_operator_pass_failures_total[{RATE}]))", "{{error}}"),), "ops",
    ),
    Panel(
        "Calls to the Kubernetes API", "Per second, of all replicas. In the local world there are none.",
        ((f"sum by (verb) (rate(muster_operator_api_calls_total[{RATE}]))", "{{verb}}"),), "reqps",
    ),
    Panel(
        "API requests", "Per second, by status.",
        ((f"sum by (status) (rate(muster_api_requests_total[{RATE}]))", "{{status}}"),), "reqps", stacked=True,
    ),
    Panel(
        "API latency", "Time to the end of the reply; streams are not counted.",
        quantiles("muster_api_request_seconds", RATE), "s",
    ),
    Panel(
        "Relay and mirror", "Rows that wait for the cluster, and versions that the rows are behind it.",
        (("sum(muster_api_relay_waiting)", "rows waiting"), ("max(muster_api_mirror_lag_versions)", "versions behind")),
    ),
    Panel(
        "Relay", "Per second.",
        (
            (f"sum(rate(muster_api_submissions_total[{RATE}]))", "submitted"),
            (f"sum(rate(muster_api_relayed_total[{RATE}]))", "handed over"),
            (f"sum(rate(muster_api_relay_failures_total[{RATE}]))", "failed"),
        ), "ops",
    ),
)  # fmt: skip
DASHBOARDS = {
    "fleet": ("Muster / Fleet", FLEET),
    "control-plane": ("Muster / Control plane", CONTROL_PLANE),
}


def dashboard(name: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    return {
        "uid": f"muster-{name}",
        "title": title,
        "tags": ["muster"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def main(arguments: list[str]) -> int:
    wanted = {
        FOLDER / f"{name}.json": json.dumps(dashboard(name, *content), indent=2) + "\n"
        for name, content in DASHBOARDS.items()
    }
    if arguments == ["--check"]:
        stale = [path.name for path, text in wanted.items() if not path.exists() or path.read_text() != text]
        print(
            *(f"{name}: run python tools/generate_dashboards.py" for name in stale), sep="\n", end="\n" if stale else ""
        )
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
