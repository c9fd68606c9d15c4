"""`muster report`'s file in a real browser: drawn from the file alone, and read without scripts too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.integration.web.browser import chromium
from tests.unit.charts.test_charts_report import HOSTILE, attempt, everywhere, report

from muster.charts.report import render_report

pytestmark = pytest.mark.long

STEPS = range(1, 301)


def curves(name: str = "loss") -> dict[str, Any]:
    axes = {"step": list(STEPS), "tokens": [1000 * s for s in STEPS], "seconds": [0.5 * s for s in STEPS]}
    mean = [2 + 3 * math.exp(-s / 60) for s in STEPS]
    evaluated = {"axes": {axis: places[49::50] for axis, places in axes.items()}, "series": {}}
    evaluated["series"][name] = {"mean": mean[49::50]}
    restart = {"number": 2, "step": 120, "tokens": 120_000, "seconds": 60.0, "cause": "hang"}
    series = {name: {"mean": mean, "min": [m - 0.2 for m in mean], "max": [m + 0.2 for m in mean]}}
    series["lr"] = {"mean": [1e-4 * s for s in STEPS]}
    found = {"axes": axes, "series": series, "evaluations": evaluated, "attempts": [{"number": 1}, restart]}
    return {**found, "startedAt": 1.0, "unread": 0}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "report.html"
    path.write_text(render_report(report(**{"curves": curves(), **changes})), encoding="utf-8")
    return path.as_uri()


def ink(page: Any) -> int:
    """How many of the first chart's pixels are drawn on."""
    return int(
        page.evaluate(
            """() => { const canvas = document.querySelector(".curve canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return data.filter((value, i) => i % 4 === 3 && value > 0).length; }"""
        )
    )


def test_a_report_is_drawn_from_its_file_alone(tmp_path: Path) -> None:
    address = write(tmp_path)
    with chromium(viewport={"width": 1280, "height": 900}) as browser:
        page = browser.page
        page.goto(address)
        page.wait_for_selector(".curve canvas")
        assert page.locator(".curve").count() == 2
        whole = ink(page)
        assert whole > 1_000
        chart = page.locator(".curve-plot").first
        assert "least" in (chart.get_attribute("aria-label") or "")
        for name, ticks, labels in (("dataWaitSeconds", [0, 5e-6, 1e-5], "0,5 µs,10 µs"), ("lr", [0, 0.001], "0,1e-3")):
            said = page.evaluate("([name, ticks]) => String(curveValues.formatTicks(name, ticks))", [name, ticks])
            assert said == labels, "the labels of an axis share a unit and a notation"
        # A chart is enlarged, and the next one pinned before it; the browser keeps that.
        page.locator(".curve-tool-large").first.click()
        page.locator(".curve-tool-pin").nth(1).click()
        assert page.locator(".curve strong").all_inner_texts() == ["Learning rate", "Loss"]
        assert page.locator(".curve.curve-large strong").all_inner_texts() == ["Loss"]
        page.locator(".curve-tool-pin").first.click()
        page.locator(".curve-tool-large").nth(0).click()
        # By keyboard: read a value, zoom in around it, and see all again.
        chart.focus()
        page.keyboard.press("Home")
        assert "steps 1 " in page.locator(".curve-readout").first.inner_text() + " "
        page.keyboard.press("+")
        assert page.get_by_role("button", name="Show all").is_visible()
        page.keyboard.press("Escape")
        assert not page.get_by_role("button", name="Show all").is_visible()
        # Over time, smoothed, on a logarithmic scale.
        page.get_by_label("Time").check()
        page.get_by_label("Logarithmic").check()
        page.get_by_label("Smoothing").fill("0.9")
        chart.focus()
        page.keyboard.press("End")
        assert "time 2m 30s" in page.locator(".curve-readout").first.inner_text()
        page.get_by_text("Values as a table").click()
        page.wait_for_selector(".curve-table tbody tr")  # a browser says `toggle` after the click has returned
        assert page.locator(".curve-table tbody tr").count() >= 20
        assert browser.asked == [address]
        assert browser.faults == []


def test_hostile_words_run_nothing_in_the_browser(tmp_path: Path) -> None:
    plain = report()
    fields = ("job", "attempts", "events", "commits", "samples")
    changes: dict[str, Any] = {name: everywhere(getattr(plain, name), HOSTILE) for name in fields}
    changes["attempts"]["items"] = [attempt(1, message=HOSTILE)]
    changes["attempts"]["costs"] = changes["attempts"]["costs"][:1]
    address = write(tmp_path, **changes, curves=curves(HOSTILE))
    with chromium(color_scheme="dark", viewport={"width": 360, "height": 740}) as browser:
        browser.page.goto(address)
        browser.page.wait_for_selector(".curve canvas")
        assert "alert(1)" in browser.page.locator("h1").inner_text()
        assert browser.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert browser.asked == [address]
        assert browser.faults == []


def test_a_report_is_read_without_scripts(tmp_path: Path) -> None:
    address = write(tmp_path)
    with chromium(java_script_enabled=False) as browser:
        browser.page.goto(address)
        assert browser.page.locator(".curve-still svg polyline").is_visible()
        assert browser.faults == []
