"""Notebook view of a job: an HTML summary, and a chart that updates while the cell waits."""

from __future__ import annotations

import html
import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from muster.client.following import JobMoment

_WIDTH, _HEIGHT = 320, 80  # of a curve, in pixels
_POINTS_MAX = 400  # more than its pixels need not be drawn
_COLOURS = {"Running": "#2563eb", "Succeeded": "#15803d", "Failed": "#b91c1c", "Cancelled": "#6b7280"}


def job_html(job: Mapping[str, Any], losses: Sequence[tuple[int, float]] = ()) -> str:
    """Phase and reason, a bar of the steps and what is known of the speed; the curve of the losses if there are any."""
    status, name = job["status"], job["metadata"]["name"]
    progress = status.get("progress") or {}
    colour = _COLOURS.get(status["phase"], "#a16207")
    head = (
        f"<b>{html.escape(name)}</b> <span style='color:{colour}'>{html.escape(status['phase'])}</span> "
        f"attempt {status.get('attempt', 0)}: {html.escape(status['because'])}"
    )
    return f"<div>{head}<br>{_progress_html(progress)}{curve_html(losses) if losses else ''}</div>"


def _progress_html(progress: Mapping[str, Any]) -> str:
    step, steps = progress.get("step"), progress.get("steps")
    if step is None:
        return ""
    bar = f"<progress value='{step}' max='{steps}' style='width:{_WIDTH}px'></progress> " if steps else ""
    facts = [f"step {step:,}{f' of {steps:,}' if steps else ''}"]
    facts += [f"loss {progress['loss']:.4g}"] if progress.get("loss") is not None else []
    facts += [f"{progress['tokensPerSecond']:,.0f} tokens/s"] if progress.get("tokensPerSecond") else []
    facts += [f"{progress['etaSeconds']:,.0f} s left"] if progress.get("etaSeconds") else []
    return f"{bar}{', '.join(facts)}<br>"


def curve_html(points: Sequence[tuple[int, float]]) -> str:
    """A line of (step, loss) as SVG; a sentence where nothing finite is to be drawn."""
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if not finite:
        return "<i>no losses yet</i>"
    finite = finite[:: max(1, math.ceil(len(finite) / _POINTS_MAX))] + finite[-1:]
    steps, losses = [step for step, _ in finite], [loss for _, loss in finite]
    width, height = max(steps) - min(steps) or 1, max(losses) - min(losses) or 1.0
    drawn = " ".join(
        f"{(step - min(steps)) / width * _WIDTH:.1f},{(max(losses) - loss) / height * (_HEIGHT - 4) + 2:.1f}"
        for step, loss in finite
    )
    line = f"<polyline points='{drawn}' fill='none' stroke='#2563eb' stroke-width='1.5'/>"
    said = f"loss {losses[0]:.4g} → {losses[-1]:.4g}, steps {steps[0]:,} to {steps[-1]:,}"
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='{said}'>{line}</svg><br><small>{said}</small>"
    )


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this, so that a chart can be updated in place."""
    ipython = sys.modules.get("IPython")  # whoever runs in a kernel has it loaded
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class LiveView:
    """A job's picture under the cell that waits for it."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._handle: Any = None

    def show(self, job: Mapping[str, Any]) -> None:
        """Draw the job as it is now, over what was drawn before."""
        ipython = importlib.import_module("IPython.display")  # an optional one: in notebooks alone
        progress = JobMoment(dict(job)).progress
        if progress.get("loss") is not None:
            self._losses[progress["step"]] = progress["loss"]
        picture = ipython.HTML(job_html(job, sorted(self._losses.items())))
        if self._handle is None:
            self._handle = ipython.display(picture, display_id=True)
        else:
            self._handle.update(picture)
