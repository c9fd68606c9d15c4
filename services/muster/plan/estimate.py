"""Estimate of a job's memory, time and cost before submission. Pure: the caller provides sizes and records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.plan.checkpoint_interval import assumed_interval_seconds
from muster.plan.communication import sent_bytes
from muster.plan.fitting import RankHost, advice, changes_that_fit, lowest_that_fits, need_of
from muster.plan.layouts import SMALLEST, layout_of, shardings_to_show
from muster.plan.memory import USABLE, Device, MemoryNeed, state_bytes, weight_bytes
from muster.plan.model_size import ModelSize
from muster.plan.throughput import MeasuredSpeed, Throughput, from_literature, from_records
from muster.plan.warnings import DataShape, Warned, warnings_of
from muster.recipe.document import JobSpec
from muster.recipe.training import Shard, TrainingConfig
from muster.words.base import Many, Record
from muster.words.job import duration_seconds
from muster.words.prices import InstancePrice, Prices

NODES_TRIED = (1, 2, 4, 8, 16, 32, 64, 128)


class RankMemory(Record):
    """The memory that one rank needs with one sharding."""

    shard: str
    parts: dict[str, int]  # bytes, by the names of memory.Need
    total: int  # bytes
    host: int = 0  # bytes of the host's memory beside it: the optimizer's state, where it is offloaded
    capacity: int | None = None  # the bytes that a rank has; None: not known
    # Whether the capacity is enough, a tenth of it being left to the allocator and to libraries; None: not known.
    fits: bool | None = None


class Speed(Record):
    """Estimated training speed of a gang."""

    tokens_per_second: float  # of the whole gang
    step_seconds: float  # of one optimizer step
    hours: float | None = None  # of the whole run; None: its number of steps is not known
    basis: str  # `measured` by a job on this server, or `published`: others' figures, by their share of the peak
    source: str  # whose figure it is, and how it was carried over


class GangOption(Record):
    """A gang that the job fits into."""

    instance_type: str
    gpu: str  # the model of its GPUs (`H100`)
    nodes: int
    gpus_per_node: int
    memory: RankMemory
    hourly: float  # the price of all its nodes, on demand, or spot where that is preferred and has a price
    speed: Speed | None = None  # None: not known
    price: float | None = None  # of the whole job; None: the time that it takes is not known


class CommitCost(Record):
    """Size of a job's checkpoints and how often they are made."""

    bytes: int  # of each but the first
    first_bytes: int  # of the first, which has the frozen weights too
    every: str  # as the job says it: `500 steps`, `10m` or `auto`
    # From one to the next; None: not known. With `auto` by an assumed throughput of the store, and by the failures that
    # Meta published (plan/checkpoint_interval.py). A job that runs goes by what it measures.
    seconds: float | None = None
    upload_seconds: float = 0.0  # of one that is not the first, by the same throughput, all ranks writing their shares


class Estimate(Record):
    """Estimate of a job's memory, time and cost."""

    parameters: int  # all weights, an adapter's included
    trained_parameters: int  # those of them that are trained
    # The gang that the job asks for, at its largest.
    ranks: int
    nodes: int
    device: str  # `cuda` or `cpu`
    # The first of the job's instance types that the table of prices knows, or else the first; empty: it names none.
    instance_type: str = ""
    memory: Many[RankMemory] = ()  # of each sharding that the job may take
    # The sharding that it would take; None: none fits, or `auto` can't choose because what a rank has is not known.
    shard: str | None = None
    # Bytes that a rank sends in a step with that sharding, or the one asked for, by what the ranks divide: `data`
    # (weights and gradients) and `context` (tokens of the same rows, in attention). Empty where `auto` can't choose.
    sent: dict[str, int] = {}
    # Whether a sharding fits; None: what a rank has is not known. Where that is not known and `options` is empty, the
    # GPU with the most memory in the table of prices is taken for it.
    fits: bool | None = None
    advice: str = ""  # where it does not fit: what is needed, what there is, and what to change
    changes: Many[str] = ()  # each of these would make it fit; empty where it fits, or where nothing would
    # The smallest gang that fits, of each instance type that the job allows and that has a GPU and a price, ordered by
    # price.
    cheapest: GangOption | None = None  # the first of `options`; None: there is none
    options: Many[GangOption] = ()
    # Of the whole run; None: not known.
    steps: int | None = None  # of the optimizer
    tokens: int | None = None
    tokens_per_parameter: float | None = None
    epochs: float | None = None
    formats: Many[str] = ()  # of each source of the training data, as its files look; empty: they were not looked at
    # Of the gang that the job asks for; None: not known.
    speed: Speed | None = None
    price: float | None = None  # of the whole run
    currency: str = "USD"  # of all prices here
    commits: CommitCost
    # Faults for which the job would fail at its start: of its data, and of rows that its model can't read.
    faults: Many[Warned] = ()
    warnings: Many[Warned] = ()
    gaps: Many[str] = ()  # what could not be estimated, and why


@dataclass(frozen=True)
class EstimateInputs:
    """Inputs of an estimate besides the job's document."""

    size: ModelSize
    casts_itself: bool  # whether the model casts its own weights, as in memory.estimate
    prices: Prices
    position_limit: int | None = None  # positions that the model was made for; None: no limit is known
    records: Sequence[MeasuredSpeed] = ()  # of jobs that ran on this server
    rank_bytes: int | None = None  # memory that a rank has on a CPU; None: not known
    data: DataShape | None = None  # None: the training data was not looked at
    data_faults: tuple[tuple[str, str], ...] = ()  # (path, message) of each source that no worker could use
    data_gap: str = ""  # why the training data was not looked at
    evaluation_gap: str = ""  # why some of the evaluation's data was not looked at


NO_ESTIMATE = "a program is not estimated: nothing is known of its model, its batch and its speed before it runs"


def estimate_job(spec: JobSpec, facts: EstimateInputs) -> Estimate:
    """Raises ValueError where the batch can't be divided over the gang, and UserError for a program."""
    training, gang, size = spec.training_config, spec.gang, facts.size
    nodes, ranks = gang.nodes.max, gang.nodes.max * gang.ranks_per_node
    kind, machine = _requested_machine(spec, facts.prices)
    host = _host(spec, facts, machine)
    memory = tuple(
        _rank_memory(size, training, shard, ranks, nodes, host) for shard in shardings_to_show(training, ranks, nodes)
    )
    steps, tokens = _length(training, facts.data)
    speed = _speed(training, facts, ranks, kind, machine, steps, gang.gpus_per_node > 0)
    options = _options(spec, facts, steps)
    fit = _GangFit.of(size, training, ranks, nodes, host if host.capacity or options else _largest(facts))
    share = _hourly(machine, gang.gpus_per_node, nodes, spec) if machine else None
    return Estimate(
        parameters=size.parameters,
        trained_parameters=size.learning,
        ranks=ranks,
        nodes=nodes,
        device="cuda" if gang.gpus_per_node else "cpu",
        instance_type=kind,
        memory=memory,
        shard=fit.shard,
        sent=_sent(size, training, fit.shard or training.parallel.shard, ranks, nodes),
        fits=fit.fits,
        advice=fit.advice,
        changes=fit.changes,
        cheapest=options[0] if options else None,
        options=options,
        steps=steps,
        tokens=tokens,
        tokens_per_parameter=tokens / size.parameters if tokens else None,
        epochs=_epochs(training, tokens, facts.data),
        formats=facts.data.formats if facts.data else (),
        speed=speed,
        price=share * speed.hours if share is not None and speed and speed.hours is not None else None,
        currency=facts.prices.currency,
        commits=_commits(spec, size, speed),
        faults=_faults(training, facts.data_faults, facts.position_limit),
        warnings=warnings_of(training, size, facts.data, tokens, steps),
        gaps=_gaps(spec, facts, machine, speed, options),
    )


def _faults(
    training: TrainingConfig, data_faults: tuple[tuple[str, str], ...], limit: int | None
) -> tuple[Warned, ...]:
    faults, length = list(data_faults), training.data.sequence_length
    if limit is not None and length > limit:
        faults.append(("data.sequenceLength", f"{length} is longer than the {limit} positions of the model"))
    return tuple(Warned(path=f"spec.training.{path}", message=message) for path, message in faults)


def _sent(size: ModelSize, training: TrainingConfig, shard: Shard, ranks: int, nodes: int) -> dict[str, int]:
    if shard == "auto":
        return {}
    accumulation = training.accumulation(training.data_parallel_size(ranks))
    return dict(vars(sent_bytes(size, training, layout_of(training, shard, ranks, nodes), accumulation)))


# --- memory ---


@dataclass(frozen=True)
class _GangFit:
    shard: Shard | None
    fits: bool | None
    advice: str = ""
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, size: ModelSize, training: TrainingConfig, ranks: int, nodes: int, host: RankHost) -> _GangFit:
        asked = training.parallel.shard
        if not host.capacity:
            return cls(None if asked == "auto" else asked, None)
        if (lowest := lowest_that_fits(size, training, ranks, nodes, host)) is not None:
            return cls(lowest[0], True)
        need = need_of(size, training, SMALLEST if asked == "auto" else asked, ranks, nodes, host)
        changes = changes_that_fit(size, training, ranks, nodes, host)
        words = advice(size, training, need, ranks, nodes, host)
        return cls(None, False, words, tuple(change.words for change in changes))


def _rank_memory(
    size: ModelSize, training: TrainingConfig, shard: Shard, ranks: int, nodes: int, host: RankHost
) -> RankMemory:
    asked = training.model_copy(update={"parallel": training.parallel.model_copy(update={"shard": shard})})
    need = need_of(size, asked, shard, ranks, nodes, host)
    return _memory_of(need, shard, host)


def _memory_of(need: MemoryNeed, shard: str, host: RankHost) -> RankMemory:
    is_measured = host.capacity > 0
    return RankMemory(
        shard=shard,
        parts=need.parts,
        total=need.total,
        host=need.host,
        capacity=host.capacity if is_measured else None,
        fits=host.holds(need) if is_measured else None,
    )


def _requested_machine(spec: JobSpec, prices: Prices) -> tuple[str, InstancePrice | None]:
    """The first of the job's instance types that the table knows."""
    for kind in spec.gang.instance_types:
        if kind in prices.types:
            return kind, prices.types[kind]
    return (spec.gang.instance_types[0] if spec.gang.instance_types else ""), None


def _host(spec: JobSpec, facts: EstimateInputs, machine: InstancePrice | None) -> RankHost:
    """Return the hardware that the gang's ranks run on; its capacity is 0 if unknown."""
    device: Device = "cuda" if spec.gang.gpus_per_node else "cpu"
    if device == "cuda":
        capacity = machine.gpu_bytes if machine else None
    else:
        capacity = _requested_bytes(spec) or facts.rank_bytes
    return RankHost(capacity or 0, device, facts.casts_itself)


def _requested_bytes(spec: JobSpec) -> int | None:
    """Return the part of gang.resources.memory that a rank gets."""
    text = spec.gang.resources.memory
    if not text:
        return None
    number = text.rstrip("KMGTikm")
    unit = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    unit["Ti"] = 2**40
    return int(float(number) * unit[text[len(number) :]]) // spec.gang.ranks_per_node


def _largest(facts: EstimateInputs) -> RankHost:
    """The GPU with the most memory, for what fits nowhere."""
    capacity = max((machine.gpu_bytes or 0 for machine in facts.prices.types.values()), default=0)
    return RankHost(capacity, "cuda", facts.casts_itself)


# --- gangs, time and money ---


def _options(spec: JobSpec, facts: EstimateInputs, steps: int | None) -> tuple[GangOption, ...]:
    """The smallest gang that fits of each instance type with a GPU and a price, the cheapest first: by the price of the
    job where its time is known, else by the hour."""
    kinds = spec.gang.instance_types
    options = []
    for kind, machine in facts.prices.types.items():
        if machine.gpu_bytes is None or _price(machine, spec) is None or (kinds and kind not in kinds):
            continue
        if (option := _smallest(spec, facts, kind, machine, steps)) is not None:
            options.append(option)
    return tuple(sorted(options, key=lambda o: (o.price is None, o.price or 0.0, o.hourly, o.instance_type)))


def _smallest(
    spec: JobSpec, facts: EstimateInputs, kind: str, machine: InstancePrice, steps: int | None
) -> GangOption | None:
    host = RankHost(machine.gpu_bytes or 0, "cuda", facts.casts_itself)
    per_node = [2**n for n in range(machine.gpus.bit_length()) if 2**n <= machine.gpus]
    for nodes, gpus in [(1, gpus) for gpus in per_node] + [(nodes, machine.gpus) for nodes in NODES_TRIED[1:]]:
        ranks = nodes * gpus
        try:
            fit = lowest_that_fits(facts.size, spec.training_config, ranks, nodes, host)
        except ValueError:  # the batch can't be divided over so many
            continue
        hourly = _hourly(machine, gpus, nodes, spec)
        if fit is None or hourly is None:
            continue
        speed = _speed(spec.training_config, facts, ranks, kind, machine, steps, on_gpus=True)
        price = hourly * speed.hours if speed and speed.hours is not None else None
        memory = _memory_of(fit[1], fit[0], host)
        return GangOption(
            instance_type=kind,
            gpu=machine.gpu,
            nodes=nodes,
            gpus_per_node=gpus,
            memory=memory,
            hourly=hourly,
            speed=speed,
            price=price,
        )
    return None


def _price(machine: InstancePrice, spec: JobSpec) -> float | None:
    """Per hour: on demand, or spot where that is preferred and has a price."""
    spot = machine.hourly("spot") if spec.gang.capacity.prefer == "spot" else None
    return spot if spot is not None else machine.hourly("on-demand")


def _hourly(machine: InstancePrice, gpus: int, nodes: int, spec: JobSpec) -> float | None:
    """Return the hourly price of a gang; a worker that takes half of a machine's GPUs pays half, as in prices.bill."""
    each = _price(machine, spec)
    if each is None:
        return None
    share = min(1.0, gpus / machine.gpus) if machine.gpus and gpus else 1.0
    return each * share * nodes


def _speed(
    training: TrainingConfig,
    facts: EstimateInputs,
    ranks: int,
    kind: str,
    machine: InstancePrice | None,
    steps: int | None,
    on_gpus: bool,
) -> Speed | None:
    throughput: Throughput | None = from_records(training, ranks, kind, on_gpus, facts.records)
    if throughput is None and on_gpus and machine is not None and machine.gpu:
        throughput = from_literature(facts.size, training, ranks, machine.gpu)
    if throughput is None:
        return None
    step = training.batch.tokens_per_step / throughput.tokens_per_second
    return Speed(
        tokens_per_second=throughput.tokens_per_second,
        step_seconds=step,
        hours=step * steps / 3600 if steps else None,
        basis=throughput.basis,
        source=throughput.source,
    )


def _length(training: TrainingConfig, data: DataShape | None) -> tuple[int | None, int | None]:
    """Optimizer steps and tokens of the run."""
    steps = training.known_steps()
    if steps is None and training.length.epochs is not None and data is not None and data.tokens is not None:
        steps = max(1, math.ceil(training.length.epochs * data.tokens / training.batch.tokens_per_step))
    return steps, None if steps is None else steps * training.batch.tokens_per_step


def _epochs(training: TrainingConfig, tokens: int | None, data: DataShape | None) -> float | None:
    if training.length.epochs is not None:
        return float(training.length.epochs)
    return tokens / data.tokens if tokens and data is not None and data.tokens else None


def _commits(spec: JobSpec, size: ModelSize, speed: Speed | None) -> CommitCost:
    """Trained weights and the optimizer's state; what is frozen comes with the first."""
    every = spec.checkpoint.every
    each = weight_bytes(spec.training_config) * size.learning + state_bytes(size, spec.training_config)
    seconds: float | None = None
    if isinstance(every, int):
        seconds = every * speed.step_seconds if speed else None
    elif every != "auto":
        seconds = float(duration_seconds(every))
    nodes, ranks = spec.gang.nodes.max, spec.gang.nodes.max * spec.gang.ranks_per_node
    upload, automatic = assumed_interval_seconds(each / ranks, nodes)
    return CommitCost(
        bytes=each,
        first_bytes=each + size.frozen_total,
        every=f"{every} steps" if isinstance(every, int) else every,
        seconds=automatic if every == "auto" else seconds,
        upload_seconds=upload,
    )


def _gaps(
    spec: JobSpec,
    facts: EstimateInputs,
    machine: InstancePrice | None,
    speed: Speed | None,
    options: Sequence[GangOption],
) -> tuple[str, ...]:
    """Return the gaps of the estimate, with reasons."""
    gaps = []
    if spec.gang.gpus_per_node and machine is None:
        named = ", ".join(spec.gang.instance_types) or "none is named in gang.instanceTypes"
        gaps.append(f"memory of the GPUs: the table of prices does not know the instance type ({named})")
    if not spec.gang.gpus_per_node and facts.rank_bytes is None and not spec.gang.resources.memory:
        gaps.append("memory of the workers: gang.resources.memory does not say it")
    if speed is None:
        gaps.append(
            "time and price of the gang asked for: no job of this model, precision and row length has run on such "
            "nodes on this server, and nothing is published for them"
        )
    if not options:
        gaps.append("cheapest gang: the model fits into no gang of an instance type with a GPU and a price")
    if facts.evaluation_gap:
        gaps.append(f"format of the evaluation data: {facts.evaluation_gap}")
    if facts.data is None:
        gaps.append(f"epochs and row lengths: {facts.data_gap or 'the training data was not looked at'}")
    return tuple(gaps)


__all__ = [
    "USABLE",
    "CommitCost",
    "Estimate",
    "EstimateInputs",
    "GangOption",
    "RankMemory",
    "Speed",
    "Warned",
    "estimate_job",
]
