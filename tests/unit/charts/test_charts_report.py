"""The report: one file without requests, in which nothing of a job's is anything but text."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from muster.charts import assets, svg
from muster.charts.report import JobReport, printable, render_report

T = 1_795_000_000.0
HOSTILE = "</script></pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{7*7}}\x1b[31m\u202e\x00"
COST = {"nodeHours": 0.5, "unpricedHours": 0.0, "cost": 4.21, "currency": "USD", "gaps": []}
AXES: dict[str, list[float]] = {"step": [1, 2, 3], "tokens": [10, 20, 30], "seconds": [0, 1, 2]}


def attempt(number: int, **more: Any) -> dict[str, Any]:
    known = {"createdAt": T + 10 * number, "firstStepAt": T + 10 * number + 2, "endedAt": T + 10 * number + 9}
    known |= {"resumeStep": 0, "lastStep": 3, "lostSteps": 1, "outcome": "failed", "cause": "hang", "message": "stuck"}
    return {"number": number, "nodes": ["node-0"], **known, **more}


def report(**changes: Any) -> JobReport:
    status = {
        "phase": "Succeeded",
        "because": "done",
        "finishedAt": T + 60,
        "progress": {"step": 3, "steps": 3, "loss": 1.5},
        "restarts": {"total": 1},
        "ledger": {"seconds": {"productive": 30.0, "queue": 10.0, "of-a-newer-version": 20.0}},
        "lastFailure": {"cause": "hang", "attempt": 1, "message": "stuck", "logTail": "the last line"},
    }
    job = {"id": "6d4b", "metadata": {"name": "demo", "creationTimestamp": T, "project": "nlp", "owner": "ann"}}
    curves = {
        "axes": AXES,
        "series": {"loss": {"mean": [3.0, None, 1.5], "min": [2.9, None, 1.4], "max": [3.1, None, 1.6]}},
        "evaluations": {"axes": AXES, "series": {}},
        "attempts": [{"number": 2, "step": 2, "tokens": 20, "seconds": 1, "cause": None}],
        "startedAt": T,
        "unread": 0,
    }
    event = {"id": 1, "type": "job.created", "at": T, "message": "submitted", "attempt": None, "data": {}}
    commit = {"step": 3, "attempt": 2, "committedAt": T, "bytes": 10, "metrics": {}, "best": True, "pinned": False}
    sample = {"step": 3, "samples": [{"prompt": "What?", "text": "That.", "finished": True}]}
    made: dict[str, Any] = {
        "job": {**job, "spec": {"training": {"model": {"preset": "muster-1m"}}}, "status": status},
        "attempts": {"items": [attempt(1), attempt(2, outcome="succeeded")], "costs": [COST, COST], "cost": COST},
        "events": [event],
        "curves": curves,
        "commits": [commit],
        "samples": [sample],
        "made_at": T + 100,
    }
    return JobReport(**{**made, **changes})


class Elements(HTMLParser):
    """What a browser would make of it: the elements with their attributes, and the text in scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag = self.found[-1][0] if self.found else ""
        if tag in ("script", "style") and self.cdata_elem:
            self.raw.append((tag, data))
        else:
            self.text += data


def everywhere(value: Any, text: str) -> Any:
    """The document with the text in place of each of its words, but those that name what kind of thing it is."""
    if isinstance(value, dict):
        kept = ("createdAt", "firstStepAt", "endedAt", "finishedAt", "creationTimestamp", "at", "committedAt")
        return {key: item if key in kept else everywhere(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [everywhere(item, text) for item in value]
    return text if isinstance(value, str) else value


def test_hostile_words_in_every_field_are_text() -> None:
    plain = report()
    fields = ("job", "attempts", "events", "commits", "samples")
    hostile = {name: everywhere(copy.deepcopy(getattr(plain, name)), HOSTILE) for name in fields}
    curves: dict[str, Any] = copy.deepcopy(dict(plain.curves))
    curves["series"][HOSTILE] = {"mean": [1.0, 2.0, 3.0]}
    page = render_report(report(**hostile, curves=curves))
    found, expected = Elements(page), Elements(render_report(plain))
    assert {tag for tag, _ in found.found} <= {tag for tag, _ in expected.found} | {"span"}
    assert sum(tag == "script" for tag, _ in found.found) == 1 + len(assets.SCRIPTS)
    assert not [tag for tag, attributes in found.found for name in attributes if name.startswith("on")]
    assert "alert(1)" in found.text, "it is shown"
    assert not set("\x1b\u202e\x00") & set(page)
    (data,) = (json.loads(text) for tag, text in found.raw if tag == "script" and text.startswith("["))
    assert HOSTILE in data[0]["curves"]["series"]


def test_nothing_is_asked_of_any_host_and_the_policy_lets_only_its_own_scripts_run() -> None:
    page = render_report(report())
    found = Elements(page)
    asking = {"src", "srcset", "action", "formaction", "data", "poster", "ping", "background"}
    assert not [(tag, attributes) for tag, attributes in found.found if asking & set(attributes)]
    assert not [tag for tag, _ in found.found if tag in ("link", "iframe", "object", "embed", "base", "form")]
    assert not [attributes for _, attributes in found.found if "style" in attributes]
    assert not [text for tag, text in found.raw if tag == "style" and ("url(" in text or "@import" in text)]
    (policy,) = (each["content"] for tag, each in found.found if tag == "meta" and "http-equiv" in each)
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for tag, text in found.raw:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert (f"'sha256-{digest}'" in policy) == (not text.startswith("[")), (tag, text[:60])
    assert "unsafe" not in policy


def test_the_shares_of_the_time_add_up_and_a_state_of_a_newer_version_is_shown() -> None:
    found = Elements(render_report(report()))
    shares = [float(share) for share in re.findall(r"(\d+\.\d)% \(", found.text)]
    assert sum(shares) == pytest.approx(100)
    assert "Of-a-newer-version" in found.text


def test_a_job_that_has_done_nothing_yet_has_a_report() -> None:
    none: dict[str, Any] = {"axes": {axis: [] for axis in AXES}, "series": {}}
    curves = {**none, "evaluations": none, "attempts": [], "startedAt": None, "unread": 0}
    status = {"phase": "Queued", "because": "waits", "finishedAt": None, "progress": None, "restarts": {"total": 0}}
    plain = report()
    job = {**plain.job, "status": {**status, "ledger": None, "lastFailure": None}}
    nothing = {"items": [], "costs": [], "cost": {**COST, "nodeHours": 0.0}}
    text = Elements(
        render_report(report(job=job, curves=curves, attempts=nothing, events=[], commits=[], samples=[]))
    ).text
    for words in ("No step is done yet.", "No attempt was begun.", "No checkpoint is left.", "Queued"):
        assert words in text


def test_text_of_others_ends_somewhere() -> None:
    assert printable("a\x07b\n\tc") == "a·b\n\tc"
    assert printable("x" * 30, 10) == "x" * 10 + " … (20 characters more)"


def test_a_curve_without_scripts_has_its_band_its_restart_and_a_label_as_text() -> None:
    drawn = svg.curve(report().curves, "loss", '"><script>')
    assert drawn.count("<polygon") == drawn.count("<polyline") == drawn.count('class="restart"') == 1
    assert "<script" not in drawn
    assert "attempt 2 from step 2" in drawn
    assert svg.curve(report().curves, "mfu", "no such series") == ""


def test_only_the_files_for_charts_are_given_out() -> None:
    for name in ("__init__.py", "../report.py", "uplot.LICENSE"):
        with pytest.raises(ValueError):
            assets.text(name)
    assert "MIT" in assets.licence()
