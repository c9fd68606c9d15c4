"""For each alert: made-up series on which it must fire, and near ones on which it must not. One sample a minute.

`0+10x120` counts up by ten 120 times, `5x60` stays at five, `_` is a scrape that failed (promtool's own notation).
"""

from __future__ import annotations

from dataclasses import dataclass

Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """at: when to look."""

    series: Series
    at: str


def job(name: str, values: str, more: str = "") -> Series:
    """A series of the operator's about one job."""
    labels = 'job_uid="u",job_name="llama",job_namespace="nlp"'
    return {f"muster_operator_job_{name}{{{labels}{more}}}": values}


def ranks(name: str, *values: str, more: str = "") -> Series:
    """A series of the trainer's, one per rank."""
    labels = 'job_uid="u",job_name="llama",job_namespace="nlp",attempt="3"'
    return {f'muster_trainer_{name}{{{labels},rank="{rank}"{more}}}': value for rank, value in enumerate(values)}


RUNNING = job("phase", "1x600", ',phase="Running"')
STEPPING = ranks("phase", "1x120", "1x120", more=',phase="step"') | ranks("rank_step_seconds", "2x120", "2x120")
CALLS = 'muster_operator_api_calls_total{verb="PUT",resource="leases"}'
WELL = {
    "muster_operator_status_writes_total": "0+10x120",
    'muster_operator_decisions_total{code="running"}': "0+10x120",
    CALLS: "0+20x120",
    'muster_operator_jobs{phase="Running"}': "3x120",
}
BUDGET = 'muster_api_project_budget_ratio{project="nlp",whose="project",unit="gpu_hours"}'
API_WELL = {'muster_api_requests_total{status="200"}': "0+60x120"}


def hours(state: str, values: str) -> Series:
    return job("goodput_seconds", values, f',state="{state}"')


FIRES: dict[str, Case] = {
    # Steps until minute 20, then none, while the ranks are still scraped: idle for 11 minutes at minute 31.
    "MusterJobStalled": Case(STEPPING | ranks("last_step_timestamp_seconds", *["60+60x19 1200x100"] * 2), "32m"),
    "MusterJobUnheard": Case(RUNNING | job("last_step_timestamp_seconds", "60x120", ',attempt="3"'), "70m"),
    "MusterLossNotFinite": Case(ranks("loss", f"2x5{' NaN' * 10}"), "10m"),
    "MusterCommitOld": Case(RUNNING | job("last_commit_timestamp_seconds", "60x180"), "140m"),
    "MusterSavesFail": Case(ranks("checkpoint_failures_total", "0x10 1 2 3 4x30"), "20m"),
    "MusterJobRestartsOften": Case(job("restarts_total", "_x10 1 2 3 4x30", ',cause="hang"'), "30m"),
    "MusterGoodputLow": Case(hours("productive", "0+30x300") | hours("lost", "0+30x300"), "200m"),
    "MusterDataStarved": Case(ranks("data_wait_seconds_total", "0+3x60", "0+15x60"), "40m"),
    "MusterStraggler": Case(ranks("straggler_ratio", "_x60", "_x5 1.6x55"), "30m"),
    "MusterMfuFell": Case(job("mfu_ratio", "0.4x180 0.1x120", ',attempt="3"'), "240m"),
    "MusterGpuLost": Case({'muster_agent_gpu_lost{node="node-a",gpu="3",device="GPU-x"}': "0x5 1x20"}, "10m"),
    "MusterXidErrors": Case({'muster_agent_xid_errors_total{node="node-a",device="x",xid="79"}': "0x5 1x20"}, "10m"),
    "MusterAgentBlind": Case({'muster_agent_source_age_seconds{node="node-a",source="imds"}': "0+60x30"}, "20m"),
    "MusterOperatorDown": Case({}, "10m"),
    "MusterLeaderMissing": Case(WELL | {CALLS: "5x120"}, "90m"),
    "MusterOperatorPassesFail": Case(
        WELL | {'muster_operator_pass_failures_total{error="ApiError"}': "0+12x120"}, "60m"
    ),
    "MusterOperatorIdle": Case(WELL | {'muster_operator_decisions_total{code="running"}': "5x120"}, "90m"),
    "MusterRestartsMany": Case({'muster_operator_restarts_total{cause="storage"}': "0x30 20x90"}, "35m"),
    "MusterPreemptionStorm": Case({'muster_operator_restarts_total{cause="preemption"}': "0x30 20x90"}, "35m"),
    "MusterRecoverySlow": Case(
        {
            'muster_operator_recovery_seconds_bucket{le="600"}': "0+1x120",
            'muster_operator_recovery_seconds_bucket{le="1800"}': "0+4x120",
            'muster_operator_recovery_seconds_bucket{le="+Inf"}': "0+4x120",
        },
        "90m",
    ),
    "MusterJobsWait": Case(
        {'muster_operator_jobs{phase="Queued"}': "2x120", 'muster_operator_jobs{phase="Running"}': "0x120"}, "60m"
    ),
    "MusterPrometheusUnheard": Case(
        {
            'muster_operator_prometheus_queries_total{outcome="failed"}': "0+6x120",
            'muster_operator_prometheus_queries_total{outcome="answered"}': "7x120",
        },
        "60m",
    ),
    "MusterAlertsNotUnderstood": Case({'muster_operator_alerts_total{outcome="unknown_action"}': "0x5 1x60"}, "10m"),
    "MusterBudgetNearlyUsed": Case({BUDGET: "0.5x5 0.85x30"}, "20m"),
    "MusterBudgetUsed": Case({BUDGET: "0.9x5 1.02x30"}, "20m"),
    "MusterApiErrors": Case(API_WELL | {'muster_api_requests_total{status="503"}': "0+60x120"}, "60m"),
    "MusterApiSlow": Case(
        {
            'muster_api_request_seconds_bucket{le="1"}': "0+60x120",
            'muster_api_request_seconds_bucket{le="5"}': "0+66x120",
            'muster_api_request_seconds_bucket{le="+Inf"}': "0+66x120",
        },
        "60m",
    ),
    "MusterRelayStuck": Case({"muster_api_relay_waiting": "3x60", "muster_api_relay_failures_total": "0+2x60"}, "30m"),
    "MusterMirrorBehind": Case({"muster_api_mirror_lag_versions": "5000x60"}, "30m"),
    "MusterWebhooksWaitLong": Case({"muster_api_webhook_oldest_seconds": "3660+60x60"}, "30m"),
}
# Near misses: what looks alike and is well, or not yet for long enough.
QUIET: dict[str, Case] = {
    # From minute 20 on the ranks are no longer scraped, as when Prometheus can't reach them: nothing is known.
    "MusterJobStalled": Case(
        ranks("phase", *["1x20 _x100"] * 2, more=',phase="step"')
        | ranks("rank_step_seconds", *["2x20 _x100"] * 2)
        | ranks("last_step_timestamp_seconds", *["60+60x19 _x100"] * 2),
        "32m",
    ),
    "MusterJobUnheard": Case(
        job("phase", "1x30 _x90", ',phase="Running"')
        | job("phase", "_x31 1x90", ',phase="Succeeded"')
        | job("last_step_timestamp_seconds", "60x120", ',attempt="3"'),
        "100m",
    ),
    "MusterLossNotFinite": Case(ranks("loss", "2x5 NaN 2x20"), "10m"),
    "MusterCommitOld": Case(RUNNING | job("last_commit_timestamp_seconds", "0+60x300"), "200m"),
    "MusterSavesFail": Case(ranks("checkpoint_failures_total", "0x10 1x60"), "20m"),
    # Four failures, the last of them long ago; and any number of preemptions.
    "MusterJobRestartsOften": Case(
        job("restarts_total", "4x120", ',cause="hang"') | job("restarts_total", "0+1x120", ',cause="preemption"'), "90m"
    ),
    # Half of the last hour was lost, but the job is young.
    "MusterGoodputLow": Case(hours("productive", "0+30x300") | hours("lost", "0+30x300"), "60m"),
    "MusterDataStarved": Case(ranks("data_wait_seconds_total", "0+3x60", "0+6x60"), "40m"),
    "MusterStraggler": Case(ranks("straggler_ratio", "_x60", "_x5 1.6x5 _x50"), "20m"),
    "MusterMfuFell": Case(job("mfu_ratio", "0.4x180 0.1x5 0.4x120", ',attempt="3"'), "240m"),
    "MusterGpuLost": Case({'muster_agent_gpu_lost{node="node-a",gpu="3",device="GPU-x"}': "0x30"}, "10m"),
    "MusterXidErrors": Case({'muster_agent_xid_errors_total{node="node-a",device="x",xid="79"}': "4x30"}, "10m"),
    "MusterAgentBlind": Case({'muster_agent_source_age_seconds{node="node-a",source="imds"}': "1x30"}, "20m"),
    "MusterOperatorDown": Case({}, "4m"),
    "MusterLeaderMissing": Case(WELL, "90m"),
    "MusterOperatorPassesFail": Case(
        WELL | {'muster_operator_pass_failures_total{error="Conflict"}': "0+1x120"}, "60m"
    ),
    "MusterOperatorIdle": Case(
        WELL
        | {
            'muster_operator_decisions_total{code="running"}': "5x120",
            'muster_operator_jobs{phase="Running"}': "0x120",
        },
        "90m",
    ),
    "MusterRestartsMany": Case({'muster_operator_restarts_total{cause="preemption"}': "0x30 20x90"}, "35m"),
    "MusterPreemptionStorm": Case({'muster_operator_restarts_total{cause="preemption"}': "0+0.5x90"}, "35m"),
    "MusterRecoverySlow": Case(
        {
            'muster_operator_recovery_seconds_bucket{le="600"}': "0+4x120",
            'muster_operator_recovery_seconds_bucket{le="1800"}': "0+4x120",
            'muster_operator_recovery_seconds_bucket{le="+Inf"}': "0+4x120",
        },
        "90m",
    ),
    "MusterJobsWait": Case(
        {'muster_operator_jobs{phase="Queued"}': "2x120", 'muster_operator_jobs{phase="Running"}': "1x120"}, "60m"
    ),
    # One of two replicas can't reach it; that one does not lead, or the other would not answer.
    "MusterPrometheusUnheard": Case(
        {
            'muster_operator_prometheus_queries_total{outcome="failed"}': "0+1x120",
            'muster_operator_prometheus_queries_total{outcome="answered"}': "0+5x120",
        },
        "60m",
    ),
    "MusterAlertsNotUnderstood": Case({'muster_operator_alerts_total{outcome="job_gone"}': "0+1x60"}, "10m"),
    # Used up is told by the other alert; and a moment above is a raised budget's.
    "MusterBudgetNearlyUsed": Case({BUDGET: "0.79x5 1.01x30"}, "20m"),
    "MusterBudgetUsed": Case({BUDGET: "0.99x5 1.01x2 0.4x30"}, "20m"),
    "MusterApiErrors": Case(API_WELL | {'muster_api_requests_total{status="503"}': "0+1x120"}, "60m"),
    "MusterApiSlow": Case(
        {
            'muster_api_request_seconds_bucket{le="1"}': "0+66x120",
            'muster_api_request_seconds_bucket{le="5"}': "0+66x120",
            'muster_api_request_seconds_bucket{le="+Inf"}': "0+66x120",
        },
        "60m",
    ),
    "MusterRelayStuck": Case({"muster_api_relay_waiting": "3x60", "muster_api_relay_failures_total": "4x60"}, "30m"),
    "MusterMirrorBehind": Case({"muster_api_mirror_lag_versions": "5000x5 0 5000x60"}, "12m"),
    "MusterWebhooksWaitLong": Case({"muster_api_webhook_oldest_seconds": "3000+60x15 0x30"}, "30m"),
}
