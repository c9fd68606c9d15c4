"""Reports of a training's worker to the operator: what `muster.worker.reports` does for every worker, with the pages of
metrics that the ranks of Muster's trainer serve."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from muster.local.metric_pages import gathered
from muster.words.base import dump_json
from muster.words.names import Env
from muster.words.signals import WorkerExit
from muster.worker import reports
from muster.worker.heartbeats import heartbeats_in


def serve_reports(directory: Path) -> None:
    """Answer in a thread of our own, if MUSTER_REPORT_PORT is set."""
    reports.serve_reports(str(directory), page=metrics_page)


def write_termination_message(end: WorkerExit) -> None:
    """Write the exit record as the termination message, if MUSTER_TERMINATION_LOG names a file for it."""
    reports.write_termination_message(json.loads(dump_json(end)), os.environ.get(Env.WORKER_DIR) or ".")


def metrics_page(directory: str, environ: Mapping[str, str]) -> str:
    """Return one page with the metrics of all ranks of this worker. Prometheus knows this one port, and not the ranks'
    random ones."""
    place = {label: environ.get(variable, "") for label, variable in reports.PLACE.items()}
    ports = [(beat["rank"], port) for beat in heartbeats_in(directory) if (port := beat.get("metricsPort"))]
    return gathered([(place | {"rank": str(rank)}, port) for rank, port in ports])
