"""The step's report: what ranks pack is what all of them read, by name, whatever the number of ranks and shares."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.trainer.config import RankPosition
from muster.trainer.parallel.groups import Groups, RankGroup
from muster.trainer.train import reduction
from muster.trainer.train.reduction import PackedReport, RankReport, StepReport, StepRequests
from muster.trainer.train.tasks.objective import BatchLosses, LossTotals

wishes = st.builds(StepRequests, stop=st.booleans(), save=st.booleans(), snapshot=st.booleans())
reports = st.builds(RankReport, st.integers(0, 10**9), wishes, st.integers(0, 1000).map(float))


def packed(rank: int, world: int, own: RankReport, loss: float, count: int) -> PackedReport:
    totals = LossTotals(("margin", "of nothing"), torch.device("cpu"))
    totals.add(BatchLosses(torch.tensor(loss), torch.tensor(count), torch.tensor([[loss, 2.0], [0.0, 0.0]])))
    return reduction.pack_step_report(totals, own, RankPosition(rank, rank, world, world))


@given(st.lists(st.tuples(reports, st.integers(0, 4096), st.integers(0, 9)), min_size=1, max_size=5), st.booleans())
def test_all_ranks_read_what_each_packed(told: list[tuple[RankReport, int, int]], under_way: bool) -> None:
    world = len(told)
    vectors = [packed(rank, world, own, float(loss), count) for rank, (own, loss, count) in enumerate(told)]
    total = torch.stack([report.vector for report in vectors]).sum(0)
    square = torch.tensor(6.0, dtype=torch.float64)
    # The sum over ranks is made above; what is added to the vector before it is alike on every rank.
    summed = PackedReport(total, vectors[0].names, _Done() if under_way else None)
    report = reduction.all_reduce_step_report(summed, square, summed_already(ranks_per_share=1))
    requests = [own.requests for own, _, _ in told]
    assert report == StepReport(
        loss=float(sum(loss for _, loss, _ in told)),
        count=float(sum(count for _, _, count in told)),
        tokens=sum(own.tokens for own, _, _ in told),
        requests=StepRequests(
            *(any(getattr(each, name) for each in requests) for name in ("stop", "save", "snapshot", "profile"))
        ),
        work_seconds=tuple(own.work_seconds for own, _, _ in told),
        squared_norm=6.0,
        values={"margin": sum(loss for _, loss, _ in told) / (2 * world)},
    )


def summed_already(ranks_per_share: int) -> Groups:
    """Groups whose sums are those of a rank alone."""
    made = Groups()
    made.model = RankGroup(tuple(range(ranks_per_share)), 0)
    return made


def test_ranks_that_share_a_model_count_their_samples_once() -> None:
    """Two shares of two ranks each: both ranks of a share report its loss, count and tokens."""
    own = RankReport(10, StepRequests(stop=False, save=True, snapshot=False), 0.5)
    reports = [packed(rank, 4, own, 3.0, 5) for rank in range(4)]
    total = torch.stack([report.vector for report in reports]).sum(0)
    square = torch.tensor(4.0, dtype=torch.float64)
    report = reduction.all_reduce_step_report(PackedReport(total, reports[0].names), square, summed_already(2))
    assert (report.loss, report.count, report.tokens) == (6.0, 10.0, 20)
    assert report.values == {"margin": 1.5}
    assert (report.work_seconds, report.squared_norm) == ((0.5,) * 4, 4.0)


class _Done:
    """A reduction that is over."""

    def wait(self) -> bool:
        return True
