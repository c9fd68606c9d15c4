"""Checkpoint interval for `checkpoint.every: auto`, from the cost of a save and the failure rate. Pure.

The trainer follows it by what it measures, the estimate by an assumed throughput and published failures.
"""

from __future__ import annotations

from math import exp, sqrt

INTERVAL_SECONDS_MIN = 10.0
INTERVAL_SECONDS_MAX = 1_800.0
# Before anything is known: 10 s for a save, and 3 restarts per 1,000 node-days
# (Meta's clusters saw 2.34 to 6.50: arXiv 2410.21680, section 4).
PRIOR_SAVE_SECONDS = 10.0
PRIOR_FAILURES_PER_NODE_SECOND = 3 / 1_000 / 86_400
# Of a rank to its store: an assumption, not a measurement. It is eight requests at a time, at 85 MB/s each, half of a
# network of 10 Gbit/s. At half of it an estimate's upload takes twice as long, and its saves are 1.4 times as far
# apart; a job goes by what it measures once it has saved.
ASSUMED_UPLOAD_BYTES_PER_SECOND = 8 * 85e6


def auto_interval_seconds(
    save_seconds: float,
    upload_seconds: float,
    between_failures: float,
    least: float = INTERVAL_SECONDS_MIN,
    most: float = INTERVAL_SECONDS_MAX,
) -> float:
    """Return the seconds from one save to the next. `save_seconds` is what a save costs the training, `upload_seconds`
    the duration of its upload in the background, `between_failures` the mean time between two failures of the gang."""
    interval = optimal_interval_seconds(max(save_seconds, 1e-3), between_failures)
    # A save that starts before the last one is uploaded would only be skipped.
    return max(min(max(interval, least), most), 1.25 * upload_seconds)


def optimal_interval_seconds(save_seconds: float, seconds_between_failures: float) -> float:
    """Return the seconds from one save to the next that maximise the share of useful time, the blocking save included.

    With failures at random moments, a stretch of x mean times between failures followed by a save of a of them is worth
    x / (e^(x+a) - 1); the best x solves 1 - e^-(x+a) = x, of which Young's and Daly's formulas are approximations.
    How long a recovery takes does not matter: it is paid once per failure, whatever the interval.
    """
    a = save_seconds / seconds_between_failures
    x = min(sqrt(2 * a), 1.0)
    for _ in range(8):  # Newton's; the function is convex from the start to the root, so it does not overshoot
        x -= (x - 1 + exp(-(x + a))) / (1 - exp(-(x + a)))
    return x * seconds_between_failures + save_seconds


def assumed_interval_seconds(bytes_per_rank: float, nodes: int) -> tuple[float, float]:
    """Return the seconds of an upload, and those from one save to the next, for a gang without measurements. Until a
    save has shown how little of its upload blocks the training, all of it counts, as in the trainer."""
    upload = bytes_per_rank / ASSUMED_UPLOAD_BYTES_PER_SECOND
    return upload, auto_interval_seconds(upload, upload, 1 / (PRIOR_FAILURES_PER_NODE_SECOND * nodes))
