"""A job's report: one HTML file that can be mailed, with its curves, its attempts and its settings inside.

It works from a file without any network: scripts and styles are inside, and its own content policy allows nothing else,
so that whatever a job's name, log line or sample holds is text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from muster.charts import assets, goodput, svg
from muster.charts.timeline import timeline
from muster.documents.yaml_text import write_yaml
from muster.words.text import amount, duration, loss, plural, readable, share, size
from muster.words.times import epoch_seconds

Document = Mapping[str, Any]

EVENTS_MAX = 2_000  # the newest; more of them make a file that mail servers refuse
TEXT_MAX = 20_000
_PROGRESS = ("step", "steps", "loss", "evaluationLoss", "evaluationStep")
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class JobReport:
    """The API's documents of one job. `attempts` is that of `/attempts`, `curves` that of `/curves`; `samples` and
    `commits` are items of theirs, newest last; `made_at` is in seconds since the epoch."""

    job: Document
    attempts: Document
    events: Sequence[Document]
    curves: Document
    commits: Sequence[Document]
    samples: Sequence[Document]
    made_at: float
    version: str = ""


def render_report(report: JobReport) -> str:
    """The file."""
    status, metadata = report.job["status"], report.job["metadata"]
    created = epoch_seconds(metadata["creationTimestamp"])
    end = epoch_seconds(status["finishedAt"]) if status.get("finishedAt") else report.made_at
    scripts = [assets.text(name) for name in assets.SCRIPTS]
    styles = [*(assets.text(name) for name in assets.STYLES), (_TEMPLATES / "report.css").read_text()]
    values = {
        "report": report,
        "name": metadata["name"],
        "status": status,
        "metadata": metadata,
        "progress": {**dict.fromkeys(_PROGRESS), **(status.get("progress") or {})},
        "seconds": end - created,
        "lanes": timeline(created, end, report.attempts["items"], report.attempts["costs"], report.events),
        "goodput": goodput.parts((status.get("ledger") or {}).get("seconds") or {}),
        "still": Markup(svg.curve(report.curves, "loss", f"Loss of {printable(metadata['name'], 100)} over its steps")),  # noqa: S704
        "sources": _data([{"name": metadata["name"], "curves": report.curves}]),
        "events": list(report.events)[-EVENTS_MAX:],
        "configuration": write_yaml(dict(report.job["spec"])),
        "scripts": [_code(script) for script in scripts],
        "styles": [_code(style) for style in styles],
        "licence": assets.licence(),
        "policy": _policy(scripts, styles),
    }
    return _environment().get_template("report.html").render(values)


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a policy that allows these scripts and styles and nothing else: no request to any host, no other script,
    no form."""
    allowed = {"script-src": scripts, "style-src": styles}
    parts = [f"{kind} {' '.join(map(_hash, texts))}" for kind, texts in allowed.items()]
    return "; ".join(["default-src 'none'", *parts, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(document: Any) -> Markup:
    """JSON as it stands in a script's tag: nothing in it ends the tag."""
    text = json.dumps(document, allow_nan=False).replace("<", "\\u003c")
    return Markup(text)  # noqa: S704


def _code(text: str) -> Markup:
    """A script or a style of ours, as it stands between its tags."""
    assert "</s" not in text.lower()
    return Markup(text)  # noqa: S704


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "amount": amount,
        "duration": duration,
        "loss": loss,
        "moment": moment,
        "plural": lambda noun, count: plural(count, noun),
        "share": share,
        "size": size,
        "text": printable,
    }
    return environment


def moment(at: float | str | None) -> str:
    """Format the time in UTC, because a report is read in any time zone."""
    if not at:
        return "–"
    return datetime.fromtimestamp(epoch_seconds(at), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def printable(value: Any, limit: int = TEXT_MAX) -> str:
    """Return foreign text as `readable` gives it, clipped."""
    text = str(value)
    cut = f" … ({plural(len(text) - limit, 'character')} more)" if len(text) > limit else ""
    return readable(text[:limit]) + cut
