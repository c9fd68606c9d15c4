"""The step's one collective besides the gradients' own: what every rank reports of the step, added up over all ranks.

The report is one fp64 vector, so that it is one all-reduce: the sums of `RankReport`, a place for each rank's working
time, what the objective reports, and last the square of the gradients' norm, which exists only after the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from muster.trainer.config import RankPosition
from muster.trainer.parallel.groups import Groups, PendingSum, groups
from muster.trainer.train.tasks.objective import LossTotals, means


@dataclass(frozen=True)
class StepRequests:
    """Requests for the end of a step: all ranks stop after it, save its state, keep its state in memory, or begin a
    trace."""

    stop: bool
    save: bool
    snapshot: bool
    profile: bool = False


@dataclass(frozen=True)
class RankReport:
    """Report of one rank on a step, without the loss and the count, which are still on the device."""

    tokens: int  # inputs that are not padding
    requests: StepRequests  # what this rank asks for
    work_seconds: float  # of this rank's own work in the step before


@dataclass(frozen=True)
class StepReport:
    """Combined report of all ranks on a step; the same on every rank."""

    loss: float  # summed over the data-parallel shares
    count: float  # of the terms of the loss, summed over the shares
    tokens: int  # inputs that are not padding, summed over the shares
    requests: StepRequests  # what any rank asked for
    work_seconds: tuple[float, ...]  # of the step before, by global rank
    squared_norm: float  # of the gradients as they are, over the whole model
    values: dict[str, float] = field(default_factory=dict)  # what the objective reports by name, as means


@dataclass(frozen=True)
class PackedReport:
    """A rank's report as a vector."""

    # fp64: tokens, the four requests, the working time of each rank, then the objective's `Totals.vector`
    vector: Tensor
    names: tuple[str, ...]  # of the objective's values
    under_way: PendingSum | None = None  # the sum over all ranks, where that has begun

    def start(self) -> PackedReport:
        """Begin to add it up over all ranks now, behind the backward pass."""
        return PackedReport(self.vector, self.names, groups().all.begin_sum(self.vector))


def pack_step_report(totals: LossTotals, own: RankReport, ranks: RankPosition) -> PackedReport:
    """Pack what this rank reports into a vector. `totals` is on the device and not read here, because reading it would
    wait for the device.
    """
    asks = (own.requests.stop, own.requests.save, own.requests.snapshot, own.requests.profile)
    work = [own.work_seconds if rank == ranks.rank else 0.0 for rank in range(ranks.world)]
    counts = torch.tensor([float(own.tokens), *map(float, asks), *work], dtype=torch.float64)
    sums = totals.vector()
    return PackedReport(torch.cat((counts.to(sums.device, non_blocking=True), sums)), totals.names)


def all_reduce_step_report(packed: PackedReport, squared_norm: Tensor, among: Groups) -> StepReport:
    """Add the reports up over all ranks and read the sum, which is the step's one wait for the device. Collective.

    `squared_norm` is what this rank adds to the square of the gradients' norm, an fp64 scalar; where the report is
    under way already, every rank has all gradients, and it is the whole square. The ranks of `among.model` report one
    share together.
    """
    if packed.under_way is None:
        values = among.all.total(torch.cat((packed.vector, squared_norm[None])))
    else:
        packed.under_way.wait()
        values = torch.cat((packed.vector, squared_norm[None])).tolist()
    of_objective = 2 + 2 * len(packed.names)
    tokens, stop, save, snapshot, profile, *work = values[: -of_objective - 1]
    loss, count, *sums, square = values[-of_objective - 1 :]
    ranks_per_share = among.model.size
    return StepReport(
        loss=loss / ranks_per_share,
        count=count / ranks_per_share,
        tokens=int(tokens) // ranks_per_share,
        requests=StepRequests(stop > 0, save > 0, snapshot > 0, profile > 0),
        work_seconds=tuple(work),
        squared_norm=square,
        values=means(packed.names, sums),
    )
