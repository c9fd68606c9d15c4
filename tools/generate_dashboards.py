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
NAME = "{{job_namespace}}/{{job_name}}"
OF_JOB = 'job_uid="$job"'
# A variable of the dashboard Job: shown as namespace/name, used as the uid, for names come again.
JOB_VARIABLE = {
    "name": "job", "label": "Job", "type": "query", "datasource": SOURCE, "refresh": 2, "sort": 1,
    "query": {"query": "muster_operator_job_attempt", "refId": "job"}, "definition": "muster_operator_job_attempt",
    "regex": '/job_name="(?<text>[^"]+)".*job_uid="(?<value>[^"]+)"/',
}  # fmt: skip
# Where browsers reach Muster: compose's address, which the chart replaces by api.publicUrl, and people may type over.
ADDRESS = "http://127.0.0.1:8642"
ADDRESS_VARIABLE = {
    "name": "muster", "label": "Muster", "type": "textbox", "query": ADDRESS,
    "current": {"selected": True, "text": ADDRESS, "value": ADDRESS},
}  # fmt: skip
# Prometheus keeps numbers only. A job is searched by its name: its uid in a cluster is not its id in the API.
JOB_LINK = {
    "title": "Story, samples and logs", "type": "link", "icon": "external link", "targetBlank": True,
    "tooltip": "The job in Muster, with the texts that it generated at its evaluations",
    "url": "${muster}/jobs?q=${job:text}",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """queries: (PromQL, legend). unit: as Grafana calls it."""

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False


def quantiles(histogram: str, window: str, which: str = "") -> tuple[tuple[str, str], ...]:
    """which: label matchers."""
    series = f"{histogram}_bucket{{{which}}}" if which else f"{histogram}_bucket"
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate({series}[{window}])))", f"p{q * 100:.0f}")
        for q in (0.5, 0.9, 0.99)
    )


FLEET = (
    Panel(
        "Jobs by phase", "What the operator has to look after.",
        (("sum by (phase) (muster_operator_jobs)", "{{phase}}"),), stacked=True,
    ),
    Panel("Nodes reserved", "Nodes that are reserved for gangs.", (("sum(muster_operator_reserved_nodes)", "nodes"),)),
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
    Panel(
        "Where the jobs' time goes", "Of all jobs that live or have just ended, as shares; they sum to one.",
        (
            (
                "sum by (state) (muster_operator_job_goodput_seconds)"
                " / ignoring (state) group_left sum(muster_operator_job_goodput_seconds)", "{{state}}",
            ),
        ), "percentunit", stacked=True,
    ),
    Panel(
        "Tokens per second", "By job.",
        (("sum by (job_namespace, job_name) (muster_operator_job_tokens_per_second)", NAME),),
    ),
    Panel(
        "Age of the newest commit", "Of running jobs: what a failure now would cost at most.",
        ((
            "(time() - max by (job_uid, job_namespace, job_name) (muster_operator_job_last_commit_timestamp_seconds))"
            ' and on (job_uid) muster_operator_job_phase{phase="Running"}', NAME,
        ),), "s",
    ),
    Panel(
        "Cost", "Of jobs that live or have just ended, by namespace. Nodes without a known price are not in it.",
        (
            ("sum by (job_namespace) (muster_operator_job_cost_dollars)", "{{job_namespace}}"),
            ("sum(muster_operator_job_unpriced_seconds) / 3600", "node-hours without a price"),
        ),
    ),
)  # fmt: skip
JOB = (
    Panel(
        "Phase", "Which one the job is in.",
        ((f"sum by (phase) (muster_operator_job_phase{{{OF_JOB}}})", "{{phase}}"),), stacked=True,
    ),
    Panel(
        "Steps", "As the operator hears of them, and the newest commit.",
        (
            (f"max(muster_operator_job_step{{{OF_JOB}}})", "step"),
            (f"max(muster_operator_job_last_commit_step{{{OF_JOB}}})", "commit"),
        ),
    ),
    Panel(
        "Loss", "Of training, per scored token; and of the last evaluation.",
        (
            (f"max(muster_operator_job_loss{{{OF_JOB}}})", "training"),
            (f"max(muster_trainer_evaluation_loss{{{OF_JOB}}} > 0)", "evaluation"),
        ),
    ),
    Panel(
        "Objective", "What it reports by name (rewards, margins, accuracies, log-probabilities), of training.",
        ((f"max by (name) (muster_trainer_objective{{{OF_JOB}}})", "{{name}}"),),
    ),
    Panel(
        "Objective, held out", "The same of the last evaluation.",
        ((f"max by (name) (muster_trainer_evaluation_objective{{{OF_JOB}}})", "{{name}}"),),
    ),
    Panel("Gradient norm", "Before clipping.", ((f"max(muster_trainer_grad_norm{{{OF_JOB}}})", "norm"),)),
    Panel(
        "Tokens per second", "Of all ranks.", ((f"max(muster_operator_job_tokens_per_second{{{OF_JOB}}})", "tokens"),)
    ),
    Panel(
        "MFU and HFU", "Where the device's peak is known; on CPUs there is none.",
        (
            (f"max(muster_trainer_mfu_ratio{{{OF_JOB}}})", "MFU"),
            (f"max(muster_trainer_hfu_ratio{{{OF_JOB}}})", "HFU"),
        ), "percentunit",
    ),
    Panel("Step time", "Of all ranks.", quantiles("muster_trainer_step_seconds", RATE, OF_JOB), "s"),
    Panel(
        "Pace of each rank", "Its last step, waits included: where one is slow, the others wait with it.",
        ((f"max by (rank) (muster_trainer_rank_step_seconds{{{OF_JOB}}})", "rank {{rank}}"),), "s",
    ),
    Panel(
        "Stragglers", "Own work of a slow rank in a step, to the median of the others; nothing where none is slow.",
        ((f"max by (rank) (muster_trainer_straggler_ratio{{{OF_JOB}}})", "rank {{rank}}"),),
    ),
    Panel(
        "Where its time goes", "From creation to now; sums to the wall clock.",
        ((f"sum by (state) (muster_operator_job_goodput_seconds{{{OF_JOB}}})", "{{state}}"),), "s", stacked=True,
    ),
    Panel(
        "What the ranks do now", "Share of the last minutes, of all ranks' processes.",
        ((f"avg by (state) (rate(muster_trainer_goodput_seconds_total{{{OF_JOB}}}[{RATE}]))", "{{state}}"),),
        "percentunit", stacked=True,
    ),
    Panel(
        "Waiting for data", "Share of each rank's time.",
        ((f"max by (rank) (rate(muster_trainer_data_wait_seconds_total{{{OF_JOB}}}[{RATE}]))", "rank {{rank}}"),),
        "percentunit",
    ),
    Panel(
        "Saves", "How long a save takes to its commit, and how long it keeps ranks from training.",
        (
            (f"sum(rate(muster_trainer_checkpoint_duration_seconds_sum{{{OF_JOB}}}[1h]))"
             f" / sum(rate(muster_trainer_checkpoint_duration_seconds_count{{{OF_JOB}}}[1h]))", "to the commit"),
            (f"sum(rate(muster_trainer_checkpoint_blocked_seconds_sum{{{OF_JOB}}}[1h]))"
             f" / sum(rate(muster_trainer_checkpoint_blocked_seconds_count{{{OF_JOB}}}[1h]))", "blocked"),
        ), "s",
    ),
    Panel(
        "Memory", "Peak of each rank.",
        ((f"max by (rank) (muster_trainer_memory_bytes{{{OF_JOB}}})", "rank {{rank}}"),), "bytes",
    ),
    Panel(
        "Workers and attempts", "Wanted and ready workers; the attempt's number.",
        (
            (f"max(muster_operator_job_workers_wanted{{{OF_JOB}}})", "wanted"),
            (f"max(muster_operator_job_workers_ready{{{OF_JOB}}})", "ready"),
            (f"max(muster_operator_job_attempt{{{OF_JOB}}})", "attempt"),
        ),
    ),
    Panel(
        "Failures by cause", "Since the job began.",
        ((f"sum by (cause) (muster_operator_job_restarts_total{{{OF_JOB}}})", "{{cause}}"),),
    ),
    Panel(
        "Cost", "So far, where the prices are known.",
        (
            (f"sum(muster_operator_job_cost_dollars{{{OF_JOB}}})", "cost"),
            (f"sum(muster_operator_job_saved_dollars{{{OF_JOB}}})", "saved by spot"),
            (f"sum by (capacity) (muster_operator_job_gpu_seconds{{{OF_JOB}}}) / 3600", "GPU-hours {{capacity}}"),
        ),
    ),
)  # fmt: skip
SPOT = (
    Panel(
        "Preemptions and evictions", "Per hour. They use up no retries.",
        (('sum by (cause) (increase(muster_operator_restarts_total{cause=~"preemption|eviction"}[1h]))', "{{cause}}"),),
        stacked=True,
    ),
    Panel(
        "Notices that stand now", "As the node agents see them: spot notices, rebalance recommendations, faults.",
        (("sum by (kind) (muster_agent_notices)", "{{kind}}"),), stacked=True,
    ),
    Panel(
        "GPU-hours", "Of jobs that live or have just ended, by capacity.",
        (("sum by (capacity) (muster_operator_job_gpu_seconds) / 3600", "{{capacity}}"),), stacked=True,
    ),
    Panel(
        "Money", "Spent, and saved against on-demand, where both prices are known.",
        (
            ("sum(muster_operator_job_cost_dollars)", "spent"),
            ("sum(muster_operator_job_saved_dollars)", "saved"),
        ),
    ),
    Panel(
        "What preemptions cost in time", "Share of the jobs' life that was lost, drained, or spent on starting again.",
        (
            (
                'sum by (state) (muster_operator_job_goodput_seconds{state=~"lost|draining|starting|loading"})'
                " / ignoring (state) group_left sum(muster_operator_job_goodput_seconds)", "{{state}}",
            ),
        ), "percentunit", stacked=True,
    ),
    Panel(
        "Recovery", "From a failure or notice to the next attempt's first step.",
        quantiles("muster_operator_recovery_seconds", "1h"), "s",
    ),
    Panel("Age of the agents' sources", "The metadata service tells of notices; the others of faults.",
        (("max by (source) (muster_agent_source_age_seconds)", "{{source}}"),), "s",
    ),
    Panel(
        "Jobs that wait", "For capacity, or for their turn.",
        (('sum(muster_operator_jobs{phase="Queued"})', "queued"),),
    ),
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
    Panel(
        "Webhooks", "Attempts per second, by what became of them.",
        ((f"sum by (outcome) (rate(muster_api_webhook_attempts_total[{RATE}]))", "{{outcome}}"),), "ops",
    ),
    Panel(
        "Webhooks' messages that wait", "Since the oldest of them was written.",
        (("max(muster_api_webhook_oldest_seconds)", "oldest"),), "s",
    ),
    Panel(
        "Questions to Prometheus", "Per second. Failed ones cost nothing: heartbeats are the authority.",
        ((f"sum by (outcome) (rate(muster_operator_prometheus_queries_total[{RATE}]))", "{{outcome}}"),), "ops",
    ),
    Panel(
        "Alerts at the webhook", "Per hour, by what became of them.",
        (("sum by (outcome) (increase(muster_operator_alerts_total[1h]))", "{{outcome}}"),), stacked=True,
    ),
)  # fmt: skip


# Each replica of the API counts the same.
def of_projects(metric: str) -> str:
    return f"max by (project) (muster_api_project_{metric})"


USAGE = (
    Panel("GPU-hours", "Of this month (UTC), by project.", ((of_projects("gpu_hours"), "{{project}}"),)),
    Panel(
        "Cost", "Of this month, where prices are known; and the node-hours that have none.",
        (
            (of_projects("cost"), "{{project}}"),
            (of_projects("unpriced_hours") + " > 0", "{{project}}: node-hours without a price"),
        ),
    ),
    Panel(
        "Budgets", "How much of a month's budget is used: the project's, or of its person who used most of theirs.",
        (("max by (project, whose, unit) (muster_api_project_budget_ratio)", "{{project}} {{unit}} ({{whose}})"),),
        "percentunit",
    ),
    Panel("Saved by spot", "Of this month.", ((of_projects("saved"), "{{project}}"),)),
    Panel(
        "Lost to failures", "GPU-hours of this month: steps trained again, and ranks that stood still.",
        ((of_projects("lost_gpu_hours"), "{{project}}"),),
    ),
    Panel("CPU-hours", "Of gangs without GPUs, of this month.", ((of_projects("cpu_hours"), "{{project}}"),)),
    Panel(
        "Workers that run", "Now.",
        (("sum by (job_project) (muster_operator_job_workers_ready)", "{{job_project}}"),), stacked=True,
    ),
    Panel(
        "Jobs that wait", "Now.",
        (('sum by (job_project) (muster_operator_job_phase{phase="Queued"})', "{{job_project}}"),), stacked=True,
    ),
)  # fmt: skip
DASHBOARDS = {
    "fleet": ("Muster / Fleet", FLEET),
    "job": ("Muster / Job", JOB),
    "spot": ("Muster / Spot", SPOT),
    "usage": ("Muster / Usage", USAGE),
    "control-plane": ("Muster / Control plane", CONTROL_PLANE),
}


def dashboard(name: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    of_job = any("$job" in query for panel in panels for query, _ in panel.queries)
    return {
        "uid": f"muster-{name}",
        "title": title,
        "tags": ["muster"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                *([JOB_VARIABLE, ADDRESS_VARIABLE] if of_job else []),
            ]
        },
        "links": [JOB_LINK] if of_job else [],
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
