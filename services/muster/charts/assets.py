"""Files for the browser, from the package: nothing is fetched from another host.

uPlot 1.6.32 is by Leon Sorokin (MIT, uplot.LICENSE), from npm's package `uplot`: dist/uPlot.iife.min.js, uPlot.min.css.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "static"
SCRIPTS = ("uplot.js", "curve_values.js", "charts.js")  # in the order in which they are loaded
STYLES = ("uplot.css", "charts.css")


def text(name: str) -> str:
    """Return one of the files. Raises ValueError for a name that is not one of them."""
    if name not in (*SCRIPTS, *STYLES):
        raise ValueError(f"there is no file {name[:100]!r} for charts")
    return (FOLDER / name).read_text(encoding="utf-8")


def licence() -> str:
    """Return the licence of uPlot, which must accompany it."""
    return (FOLDER / "uplot.LICENSE").read_text(encoding="utf-8")
