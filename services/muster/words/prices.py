"""Cost of a job: GPU-hours and money, from its attempts and a table of prices.

The built-in table (documents/prices.json) has list prices per hour in us-east-1, Linux, on demand: p4d, p4de and p5 as
retrieved on 2026-11-09 by github.com/datareceipts/data-receipts (109-gpu-pricing), p5en from
github.com/dstackai/dstack/pull/4110 of 2026-08-06. The memory of a GPU is what torch reports as its total, a little
less than the data sheet's. Spot prices move by the hour, so it has none. What a table lacks is a gap, which is reported
and never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from muster.words.base import Many, Record, Spec
from muster.words.status import Attempt

Price = Annotated[float, Field(ge=0)]


class InstancePrice(Spec):
    """The GPUs of one machine of an instance type, and what the machine costs per hour."""

    gpus: Annotated[int, Field(ge=0)] = 0  # of the whole machine; a worker that takes half of them pays half
    gpu: str = ""  # the model of the GPUs (`H100`), by the names of plan/flops.py
    gpu_memory_gib: Annotated[float, Field(gt=0)] | None = None  # of each GPU, as torch reports it; None: not known
    on_demand: Price | None = None  # per hour, in the table's currency; None: not known
    spot: Price | None = None  # likewise

    @property
    def gpu_bytes(self) -> int | None:
        return int(self.gpu_memory_gib * 2**30) if self.gpu_memory_gib else None

    def hourly(self, capacity: str | None) -> float | None:
        return self.spot if capacity == "spot" else self.on_demand


class Prices(Spec):
    """A table of prices."""

    currency: str = "USD"
    region: str = ""  # where these prices hold
    # By instance type. The key `*` is for nodes whose type is not known or not listed, such as your own machines.
    types: dict[str, InstancePrice] = Field(default_factory=dict)

    def of(self, instance_type: str) -> InstancePrice | None:
        return self.types.get(instance_type) or self.types.get("*")


@dataclass(frozen=True, slots=True)
class HourlyRate:
    """Price of one worker's hour, and its saving against on-demand; None where it is not known."""

    cost: float | None
    saved: float | None


def rate(instance_type: str, capacity: str, gpus_per_worker: int, prices: Prices) -> HourlyRate:
    """A worker that takes a part of a machine's GPUs pays that part; one without GPUs pays the machine."""
    table = prices.of(instance_type)
    hourly = table.hourly(capacity) if table else None
    if table is None or hourly is None:
        return HourlyRate(None, None)
    share = min(1.0, gpus_per_worker / table.gpus) if table.gpus and gpus_per_worker else 1.0
    if capacity != "spot":
        return HourlyRate(hourly * share, 0.0)
    return HourlyRate(hourly * share, None if table.on_demand is None else (table.on_demand - hourly) * share)


def no_price(instance_type: str, capacity: str) -> str:
    return f"no {capacity} price of {instance_type or 'nodes of an unknown type'}"


class Bill(Record):
    """Usage and cost of a job's attempts."""

    currency: str = "USD"
    gpu_hours: dict[str, float] = {}  # by capacity: `on-demand` or `spot`
    node_hours: float = 0.0
    cost: float = 0.0  # of the nodes that have a price
    saved: float = 0.0  # what the spot nodes would have cost more on demand, where both prices are known
    unpriced_hours: float = 0.0  # of nodes that are not in the cost
    gaps: Many[str] = ()  # why those are not in the cost


def bill(attempts: Iterable[Attempt], prices: Prices, now: float) -> Bill:
    """The bill of these attempts. One that has not ended is counted up to `now`, in seconds since the epoch."""
    gpu_hours: dict[str, float] = {}
    nodes = cost = saved = unpriced = 0.0
    gaps: dict[str, None] = {}
    for attempt in attempts:
        if attempt.outcome == "waiting":
            continue  # it has no nodes yet
        end = attempt.ended_at if attempt.ended_at is not None else max(now, attempt.created_at)
        hours = max(0.0, end - attempt.created_at) / 3600.0 * attempt.workers
        capacity = attempt.capacity or "on-demand"
        nodes += hours
        if attempt.gpus_per_worker:
            gpu_hours[capacity] = gpu_hours.get(capacity, 0.0) + hours * attempt.gpus_per_worker
        hourly = rate(attempt.instance_type, capacity, attempt.gpus_per_worker, prices)
        if hourly.cost is None:
            unpriced += hours
            if hours:
                gaps[no_price(attempt.instance_type, capacity)] = None
            continue
        cost += hours * hourly.cost
        saved += hours * (hourly.saved or 0.0)
    return Bill(
        currency=prices.currency,
        gpu_hours=gpu_hours,
        node_hours=nodes,
        cost=cost,
        saved=saved,
        unpriced_hours=unpriced,
        gaps=tuple(gaps),
    )
