"""Recording and alert rules, judged by Prometheus' own tool: `make test-rules`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.rules.cases import FIRES, QUIET, Case
from tests.tidy.repository import ROOT

RULES = ROOT / "helm" / "muster" / "files" / "alerts.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks.md"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no `promtool` here (Debian: apt install prometheus)")


def alerts() -> dict[str, dict[str, Any]]:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    subprocess.run([str(PROMTOOL), "check", "rules", str(RULES)], check=True, capture_output=True)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert list(FIRES) == list(QUIET) == list(alerts())


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    tests = [_test(name, case, fires=True) for name, case in FIRES.items()]
    tests += [_test(name, case, fires=False) for name, case in QUIET.items()]
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _test(name: str, case: Case, fires: bool) -> dict[str, Any]:
    firing = f'group(ALERTS{{alertstate="firing",alertname="{name}"}})'
    return {
        "name": f"{name} {'fires' if fires else 'stays quiet'}",
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": case.at, "exp_samples": [{"labels": "{}", "value": 1}] if fires else []}
        ],
    }


def test_every_alert_says_what_it_means_and_where_help_is() -> None:
    for name, rule in alerts().items():
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, name
        assert rule["annotations"]["runbook_url"] == f"RUNBOOKS/{name}", name
        assert rule["labels"]["severity"] in ("critical", "warning"), name


def test_an_alert_with_an_action_says_whom_it_concerns() -> None:
    """The operator ignores one that has no job_uid and attempt; a rule that sums them away would never act."""
    from muster.operator.sources.alerts import KINDS

    acting = {name: rule for name, rule in alerts().items() if "muster_action" in rule["labels"]}
    assert acting
    records = {
        r["record"]: r["expr"] for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"] if "record" in r
    }
    for name, rule in acting.items():
        assert rule["labels"]["muster_action"] in KINDS, name
        for record in re.findall(r"muster:\w+", rule["expr"]):
            assert "by (job_uid, job_name, job_namespace, attempt)" in records[record], f"{name}: {record}"


def test_every_alert_has_a_runbook() -> None:
    """A section for each, in the rules' order, that says what it means, what it harms, where to look and what to do."""
    sections = re.split(r"^### ", RUNBOOKS.read_text(), flags=re.MULTILINE)[1:]
    assert [section.split("\n", 1)[0] for section in sections] == list(alerts())
    for section in sections:
        name = section.split("\n", 1)[0]
        assert re.findall(r"^\*\*(\w[\w ]*)\.\*\*", section, re.MULTILINE) == [
            "Meaning", "Impact", "First look", "Fix",
        ], name  # fmt: skip
