"""Closed formulas for the share of the wall clock that is spent on steps which are not trained again."""

from __future__ import annotations

import math


def best_interval(mtbf: float, recovery: float, block: float) -> float:
    """arXiv 2410.18124: the interval with the highest availability."""
    return block + math.sqrt(2 * (mtbf + recovery) * block + block**2)


def formula(mtbf: float, restart: float, interval: float, block: float, commit: float) -> float:
    """Meta's E[ETTR], as the renewal that it is the first order of: an interruption ends, on average, `mtbf` seconds of
    training, of which those after the last commit are lost, and costs `restart` seconds on top.
    """
    return (mtbf - interval / 2 - commit) / (mtbf + restart) / (1 + block / interval)
