"""Rank 0's half of a save: hear every rank's report, check them against each other and the store, confirm the attempt,
publish the one COMMIT. Runs in rank 0's upload process."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from muster.storage.errors import StoreError, StoreRefusal
from muster.storage.store import Store
from muster.trainer.checkpoint.channel import ChannelClosed
from muster.trainer.checkpoint.collect import CollectionState, collect
from muster.trainer.checkpoint.commits import commit_in, publish
from muster.trainer.checkpoint.emergency_save import worth_a_commit
from muster.trainer.checkpoint.entries import Entries
from muster.trainer.checkpoint.failures import CheckpointError
from muster.trainer.checkpoint.frozen import FrozenFiles, FrozenWeightsMissing, frozen_in, see_all
from muster.trainer.checkpoint.messages import (
    GoAhead,
    PeerHello,
    PriorityRequest,
    SaveChannel,
    SaveOrder,
    SaveResult,
    ShareReport,
    StepChosen,
    StepsLeft,
    StepTimes,
    TensorSlices,
)
from muster.trainer.errors import StaleAttempt
from muster.words.checkpoint import Commit, FileEntry, Slice, TensorEntry
from muster.words.job import Keep
from muster.worker.fence import FenceUnreachable, confirm

FENCE_RETRIES = 5
# For the ranks that die after the first: the launcher kills those that don't notice by themselves (launch/worker.py).
OTHERS_SECONDS_MAX = 20.0


@dataclass(frozen=True)
class SavedJob:
    """Facts about a job that stay the same from save to save."""

    identity: dict[str, Any]  # the fields of the COMMIT that stay the same
    job_uid: str
    attempt: int
    worker: int
    incarnation: int
    fence: str | None  # where the current attempt is written; None checks nothing
    world_size: int
    keep: Keep  # which commits are kept
    entries: Entries | None = None  # folders of the commits, where the store is each node's own


class SaveCoordinator:
    def __init__(self, store: Store, job: SavedJob, listener: socket.socket | None, token: str) -> None:
        self._store, self._job, self._token = store, job, token
        self._changed = threading.Condition()
        self._reports: dict[int, dict[int, ShareReport]] = {}  # by the number of the save and the rank
        self._results: dict[int, SaveResult] = {}  # by the number of the save
        self._channels: dict[int, SaveChannel] = {}
        self._left: dict[int, StepTimes] = {}  # by dead ranks
        self._decided = False
        self._chosen: int | None = None
        self._frozen: FrozenFiles | None = None  # that a COMMIT names
        self._seen = CollectionState()
        self._committed_step, self._committed_at, self._commit_seconds = -1, time.monotonic(), 0.0
        if listener is not None:
            threading.Thread(target=self._accept, args=(listener,), name="coordinator", daemon=True).start()

    def report(self, rank: int, report: ShareReport) -> None:
        """Take a rank's report of a save."""
        with self._changed:
            self._reports.setdefault(report.seq, {})[rank] = report
            self._changed.notify_all()

    def wait_for(self, seq: int, ranks: Sequence[int], seconds: float) -> None:
        """Return when these ranks have reported, or the save is settled, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: seq in self._results or set(ranks) <= self._reports.get(seq, {}).keys(), seconds
            )

    def settle(self, order: SaveOrder, deadline: float) -> SaveResult:
        """Wait for every rank, commit, and send them all the result."""
        began = time.monotonic()
        result = SaveResult(seq=order.seq, step=order.step)
        try:
            commit = self._commit(order, self._all_reports(order.seq, deadline))
            result = replace(result, committed=True)
            self._frozen = frozen_in(commit)
            self._committed_step, self._committed_at = order.step, order.at
            self._commit_seconds = time.monotonic() - began
        except StaleAttempt as stale:
            result = replace(result, error=str(stale), stale=True)
        except FrozenWeightsMissing as missing:
            self._frozen = None
            result = replace(result, error=str(missing), frozen_missing=True)
        except (StoreError, CheckpointError, FenceUnreachable, ValueError, OSError) as error:
            result = replace(result, error=str(error), refused=isinstance(error, StoreRefusal))
        self._announce(result)
        return result

    def use_frozen(self, step: int) -> None:
        """The commit of `step` names the frozen weights. Where it can't be read, the next save has them written
        again."""
        try:
            self._frozen = frozen_in(commit_in(self._store, step, own=True))
        except (CheckpointError, StoreError):
            self._frozen = None

    def choose(self, rank: int, left: StepTimes, seconds: float) -> int | None:
        """Rank `rank` is dead and left whole copies of these steps. Returns the newest that all left, when all have
        said so, if it is worth a commit; None otherwise, or where one does not say so in time."""
        with self._changed:
            self._left[rank] = left
            if rank == 0:  # who has uploaded what rank 0 did not get to order must hear that, to tell what else it has
                for seq in self._reports.keys() - self._results.keys():
                    self._announce(_never_led(next(iter(self._reports[seq].values()))))
            self._changed.notify_all()
            world = self._job.world_size
            complete = self._changed.wait_for(lambda: len(self._left) == world or {} in self._left.values(), seconds)
            if complete and len(self._left) == world and not self._decided:
                self._decided, self._chosen = True, self._newest_left()
            return self._chosen

    def _newest_left(self) -> int | None:
        steps = set.intersection(*(set(each) for each in self._left.values()))
        newest = max(steps, default=-1)
        if newest <= self._committed_step:
            return None
        seq, at = self._left[0][newest]
        if not worth_a_commit(at - self._committed_at, self._commit_seconds):
            return None
        self._results = {other: result for other, result in self._results.items() if other != seq}  # it is retried
        return newest

    def collect(self, step: int) -> None:
        """Remove what the commit of `step` has made superfluous."""
        collect(self._store, self._job.attempt, step, self._job.keep, self._seen)

    def _all_reports(self, seq: int, deadline: float) -> dict[int, ShareReport]:
        """Every rank's report. Raises CheckpointError for the first that says it failed (Refused, where its store will
        never take it), or when time is up."""
        world = self._job.world_size
        with self._changed:
            while True:
                reports = self._reports.get(seq, {})
                for rank, report in sorted(reports.items()):
                    if report.error:
                        raise (StoreRefusal if report.refused else CheckpointError)(f"rank {rank}: {report.error}")
                if len(reports) == world:
                    return reports
                missing = [rank for rank in range(world) if rank not in reports]
                if dead := [rank for rank in missing if self._never_reports(rank, seq)]:
                    raise CheckpointError(f"rank {dead[0]} died before its copy was whole")
                if (left := deadline - time.monotonic()) <= 0:
                    names = ", ".join(map(str, missing))
                    raise CheckpointError(
                        f"no report came from rank {names}; its upload is too slow, or its node is gone"
                    )
                self._changed.wait(left)

    def _never_reports(self, rank: int, seq: int) -> bool:
        """Return whether this rank is dead and left nothing of save `seq`."""
        return rank in self._left and all(seq != left for left, _ in self._left[rank].values())

    def _commit(self, order: SaveOrder, reports: dict[int, ShareReport]) -> Commit:
        by_rank = [reports[rank] for rank in range(self._job.world_size)]
        files = tuple(report.file for report in by_rank if report.file is not None)
        frozen = self._frozen_files(by_rank)
        commit = Commit.model_validate(
            {
                **self._job.identity,
                **order.commit,
                "step": order.step,
                "committed_at": time.time(),
                "world_size": self._job.world_size,
                "files": files + frozen.files,
                "tensors": assemble([report.slices for report in by_rank]) | frozen.behind(len(files)),
                "stateless": tuple(by_rank[0].stateless),
                "optimizer_groups": tuple(
                    {"parameters": names, "settings": settings}
                    for names, settings in zip(by_rank[0].groups, order.settings, strict=True)
                ),
                "rng": tuple(report.rng for report in by_rank if report.rng),
            }
        )
        self._see_all(files)
        self._confirm_attempt()
        publish(self._store, commit)
        if self._job.entries is not None:
            self._job.entries.add_commit(commit.step)
        return commit

    def _see_all(self, files: Sequence[FileEntry]) -> None:
        """Raises StoreError. Where each node has a store of its own, the others' files are seen by those who publish
        them."""
        if self._job.entries is None:
            see_all(self._store, files)

    def _frozen_files(self, reports: Sequence[ShareReport]) -> FrozenFiles:
        """Return the frozen files that an earlier COMMIT names, or that all ranks have just written. Raises
        FrozenWeightsMissing where neither set is complete."""
        frozen = self._frozen or FrozenFiles((), {})
        if self._frozen is None and (files := tuple(r.frozen_file for r in reports if r.frozen_file is not None)):
            if lacking := [rank for rank, report in enumerate(reports) if report.frozen_file is None]:
                raise FrozenWeightsMissing(f"rank {lacking[0]} has not written its part of the frozen weights")
            frozen = FrozenFiles(files, assemble([report.frozen_slices for report in reports]))
        elif self._frozen is None and any(report.frozen_named for report in reports):
            raise FrozenWeightsMissing("the COMMIT that named the frozen weights can't be read any more")
        try:
            self._see_all(frozen.files)
        except StoreError as error:
            raise FrozenWeightsMissing(f"the frozen weights are written again with the next save: {error}") from error
        return frozen

    def _confirm_attempt(self) -> None:
        job = self._job
        if job.fence is None:
            return
        for retry in range(FENCE_RETRIES):
            try:
                return confirm(job.fence, job.job_uid, job.attempt, job.worker, job.incarnation)
            except FenceUnreachable:
                if retry == FENCE_RETRIES - 1:
                    raise
                time.sleep(0.2 * 2**retry)

    def _announce(self, result: SaveResult) -> None:
        with self._changed:
            self._results = {**self._results, result.seq: result}
            self._changed.notify_all()
            self._reports = {seq: reports for seq, reports in self._reports.items() if seq > result.seq}
            channels = list(self._channels.values())
        for channel in channels:
            try:
                channel.send(result)
            except ChannelClosed:  # it will ask again when it is back
                pass

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0:  # closed: this rank's saving is over
                    return
                raise
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(SaveChannel(connection),), daemon=True).start()

    def _serve(self, channel: SaveChannel) -> None:
        """One rank's connection: who it is, then its reports."""
        rank = -1
        try:
            hello = channel.receive(timeout_seconds=10)
            if not isinstance(hello, PeerHello) or not hmac.compare_digest(hello.token, self._token):
                return channel.close()
            rank = hello.rank
            with self._changed:
                self._channels[rank] = channel
                self._left.pop(rank, None)  # its process was replaced
            while (message := channel.receive()) is not None:
                if isinstance(message, PriorityRequest):
                    self.wait_for(message.seq, message.first, message.first_seconds)
                    channel.send(GoAhead(seq=message.seq))
                elif isinstance(message, StepsLeft):
                    channel.send(StepChosen(step=self.choose(rank, message.left, OTHERS_SECONDS_MAX)))
                elif isinstance(message, ShareReport):
                    if (result := self._earlier_result(message)) is not None:
                        channel.send(result)
                    else:
                        self.report(rank, message)
        except (ChannelClosed, ValueError):
            channel.close()
        with self._changed:  # its process ended, so nothing is left of it; one that is replaced comes back
            if self._channels.get(rank) is channel:
                self._left[rank] = {}
                self._changed.notify_all()

    def _earlier_result(self, report: ShareReport) -> SaveResult | None:
        """The result of a save that was settled before this report came (again): by us, or by our predecessor."""
        with self._changed:
            if report.seq in self._results:
                return self._results[report.seq]
        if report.again and report.file is not None and self.committed(report.step, report.file.key):
            return SaveResult(seq=report.seq, step=report.step, committed=True)
        return _never_led(report) if 0 in self._left and not self._decided else None

    def committed(self, step: int, key: str) -> bool:
        """Return whether the commit of this step, by this attempt, names `key`."""
        try:
            commit = commit_in(self._store, step, own=True)
        except (CheckpointError, StoreError):
            return False
        return commit.attempt == self._job.attempt and any(file.key == key for file in commit.files)


def _never_led(report: ShareReport) -> SaveResult:
    return SaveResult(seq=report.seq, step=report.step, error="rank 0 died before its copy was whole")


def assemble(slices_of_files: list[TensorSlices]) -> dict[str, TensorEntry]:
    """The tensor index from each file's {name: [dtype, shape, offset, extent, start]}.

    Raises CheckpointError where files disagree about a tensor, or its slices do not cover it.
    """
    about: dict[str, tuple[str, tuple[int, ...]]] = {}
    slices: dict[str, list[Slice]] = {}
    for file, named in enumerate(slices_of_files):
        for name, (dtype, shape, offset, extent, start) in named.items():
            if about.setdefault(name, (dtype, tuple(shape))) != (dtype, tuple(shape)):
                raise CheckpointError(f"{name}: the ranks disagree: {about[name]} and {(dtype, tuple(shape))}")
            slice_ = Slice(file=file, name=name, offset=tuple(offset), extent=tuple(extent), start=start)
            slices.setdefault(name, []).append(slice_)
    for name, (_, shape) in about.items():
        elements = sum(prod(slice_.extent) for slice_ in slices[name])
        if elements != prod(shape):
            raise CheckpointError(f"{name}: the ranks wrote {elements} of its {prod(shape)} elements")
    return {n: TensorEntry(dtype=d, shape=s, slices=tuple(slices[n])) for n, (d, s) in about.items()}
