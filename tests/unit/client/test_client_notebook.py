"""A job's picture: what a job says is text and never markup, and a curve has the points that are numbers."""

import sys
import types
from typing import Any

import pytest

from muster.client import notebook
from muster.client.answers import JobView
from muster.client.notebook import LiveView, curve_html, in_notebook, job_html


def job(**status: Any) -> dict[str, Any]:
    told = {"phase": "Running", "attempt": 2, "because": "<script>", **status}
    return {"id": "x", "metadata": {"name": "mine<b>"}, "status": told}


def test_what_a_job_says_is_no_markup() -> None:
    progress = {"step": 40, "steps": 200, "loss": 2.25, "tokensPerSecond": 1234.5, "etaSeconds": 90.0}
    text = job_html(job(progress=progress), [(1, 3.0), (40, 2.25)])
    assert "<script>" not in text
    assert "mine&lt;b&gt;" in text
    assert "<progress value='40' max='200'" in text
    assert "step 40 of 200, loss 2.25, 1,234 tokens/s, 90 s left" in text
    assert "loss 3 → 2.25, steps 1 to 40" in text
    assert JobView(job())._repr_html_() == job_html(job())


def test_a_curve_has_the_finite_points_and_not_too_many() -> None:
    assert curve_html([(1, float("nan"))]) == "<i>no losses yet</i>"
    drawn = curve_html([(step, 5.0 - step / 1000) for step in range(5000)])
    points = drawn.partition("points='")[2].partition("'")[0].split()
    assert 300 < len(points) <= notebook._POINTS_MAX + 1
    assert (points[0], points[-1]) == ("0.0,2.0", "320.0,78.0")


class Shown:
    """Stands for IPython's display: what was drawn first, and what took its place."""

    def __init__(self) -> None:
        self.pictures: list[str] = []

    def display(self, picture: str, display_id: bool) -> Any:
        assert display_id
        self.pictures.append(picture)
        return self

    def update(self, picture: str) -> None:
        self.pictures.append(f"again {picture}")


def test_the_picture_is_brought_up_to_date_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    stand_in = types.SimpleNamespace(HTML=lambda text: text, display=shown.display)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", stand_in)
    view = LiveView()
    view.show(job())
    view.show(job(progress={"step": 1, "steps": 9, "loss": 4.0}))
    view.show(job(progress={"step": 5, "steps": 9, "loss": 3.0}))
    first, second, third = shown.pictures
    assert "polyline" not in first
    assert second.startswith("again ")
    assert "loss 4 → 3, steps 1 to 5" in third


def test_a_kernel_is_known_by_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_notebook() is False
    for config, expected in (({"IPKernelApp": {}}, True), ({}, False)):
        shell = types.SimpleNamespace(config=config)
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert in_notebook() is expected
