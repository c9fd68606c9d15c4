"""How bad the weather is. The rates are drawn from the seed too, so that some worlds are calm and some are hell."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Weather:
    """Rates per simulated second, over the whole world; chances per occasion. Zero in many worlds."""

    seconds: float  # how long faults go on before everything heals
    operators: int
    # the operator and its API
    operator_crash: float
    api_error: float  # chance that a call fails before it did anything
    lost_reply: float  # chance that it fails after it did everything
    spurious_conflict: float
    stale: float  # chance that a cached read lags behind, per kind
    lost_news: float  # chance that a change is not heard of
    outage: float
    latency: float  # of a call, seconds on average
    # nodes
    node_death: float
    node_flap: float
    partition: float
    drain: float
    spot: float
    # workers
    crash: float
    user_error: float
    out_of_memory: float
    straggle: float
    bug: float  # chance per job that one of its steps fails every time
    hang: float
    disk_pause: float  # heartbeats of a node don't get out for a while; training goes on
    hold: float  # a process is held for a moment, by a debugger or a profiler
    pod_deleted: float
    never_starts: float  # chance per worker
    slow_start: float  # chance per worker
    ignores_term: float  # chance per worker that it must be killed
    vanishes: float  # chance that an ended worker that is being removed is not seen as ended
    # commits
    commit_lag: float  # seconds on average
    commit_fails: float
    # signals
    signals: float
    late_signal: float  # chance that a signal is delivered late, and twice
    # people
    user: float
    newer: float
    # time
    clock_jump: float
    # admission of workers
    quota: float = 0.0  # a namespace's quota is used up for a while
    misnamed: float = 0.0  # chance per job that it names a service account that is not there
    # Chance per job that it names an image that is not there. Not in the repr, from which other dice are seeded.
    mistyped: float = field(default=0.0, repr=False)
    # A worker is replaced within its attempt. No rule does that yet, so somebody edits the status.
    replaced: float = field(default=0.0, repr=False)


def draw(rng: random.Random) -> Weather:
    def rate(low: float, high: float, share: float = 0.5) -> float:
        """Zero in 1 - share of the worlds; else log-uniform."""
        return low * (high / low) ** rng.random() if rng.random() < share else 0.0

    calm = rng.random() < 0.08
    weather = Weather(
        seconds=rng.choice((200.0, 400.0, 700.0)),
        operators=2 if rng.random() < 0.35 else 1,
        operator_crash=rate(0.002, 0.05),
        api_error=rate(0.003, 0.15),
        lost_reply=rate(0.003, 0.15),
        spurious_conflict=rate(0.003, 0.1, 0.3),
        stale=rate(0.05, 0.8, 0.6),
        lost_news=rate(0.05, 0.9),
        outage=rate(0.001, 0.01, 0.3),
        latency=rng.choice((0.01, 0.1, 1.0)),
        node_death=rate(0.0005, 0.01),
        node_flap=rate(0.0005, 0.01, 0.4),
        partition=rate(0.0005, 0.005, 0.4),
        drain=rate(0.0005, 0.005, 0.4),
        spot=rate(0.001, 0.01, 0.5),
        crash=rate(0.001, 0.02),
        user_error=rate(0.0003, 0.002, 0.2),
        out_of_memory=rate(0.0003, 0.002, 0.15),
        straggle=rate(0.001, 0.01, 0.3),
        bug=rate(0.05, 0.3, 0.2),
        hang=rate(0.0005, 0.004, 0.3),
        disk_pause=rate(0.001, 0.01, 0.3),
        hold=rate(0.002, 0.02, 0.3),
        pod_deleted=rate(0.0005, 0.004, 0.3),
        never_starts=rate(0.005, 0.05, 0.2),
        slow_start=rate(0.02, 0.3, 0.4),
        ignores_term=rate(0.02, 0.5, 0.4),
        vanishes=rng.choice((0.0, 0.5, 1.0)),
        commit_lag=rng.choice((0.2, 2.0, 15.0)),
        commit_fails=rate(0.02, 0.3, 0.3),
        signals=rate(0.001, 0.02, 0.5),
        late_signal=rng.choice((0.0, 0.3, 1.0)),
        user=rate(0.001, 0.02, 0.6),
        newer=rate(0.0003, 0.002, 0.1),
        clock_jump=rate(0.0005, 0.01, 0.2),
    )
    return _with_replacements(_with_rejections(heal(weather) if calm else weather))


def _with_rejections(weather: Weather) -> Weather:
    """By dice of their own, so that worlds without them are what they were before there were any."""
    dice = random.Random(repr(weather))
    if dice.random() < 0.6:
        return weather
    quota, misnamed, mistyped = dice.choice((0.002, 0.01)), dice.choice((0.0, 0.1)), dice.choice((0.0, 0.1))
    return replace(weather, quota=quota, misnamed=misnamed, mistyped=mistyped)


def _with_replacements(weather: Weather) -> Weather:
    """By dice of their own, too."""
    dice = random.Random(repr(weather) + "replaced")
    return replace(weather, replaced=dice.choice((0.005, 0.02))) if dice.random() < 0.2 else weather


def heal(weather: Weather) -> Weather:
    """The same world in fair weather."""
    return Weather(
        seconds=weather.seconds,
        operators=weather.operators,
        operator_crash=0.0,
        api_error=0.0,
        lost_reply=0.0,
        spurious_conflict=0.0,
        stale=0.0,
        lost_news=0.0,
        outage=0.0,
        latency=0.01,
        node_death=0.0,
        node_flap=0.0,
        partition=0.0,
        drain=0.0,
        spot=0.0,
        crash=0.0,
        user_error=0.0,
        out_of_memory=0.0,
        straggle=0.0,
        bug=0.0,
        hang=0.0,
        disk_pause=0.0,
        hold=0.0,
        pod_deleted=0.0,
        never_starts=0.0,
        slow_start=0.0,
        ignores_term=0.0,
        vanishes=weather.vanishes,
        commit_lag=0.5,
        commit_fails=0.0,
        signals=0.0,
        late_signal=0.0,
        user=0.0,
        newer=0.0,
        clock_jump=0.0,
    )
