"""Replies of the API about jobs, shared by server and client."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from muster.plan.estimate import Estimate
from muster.recipe.document import JobSpec
from muster.words.base import Time
from muster.words.names import API_VERSION, KIND
from muster.words.prices import Bill
from muster.words.samples import Samples
from muster.words.status import Attempt, Failure, JobStatus, Restarts


class Reply(BaseModel):
    """camelCase keys. What a newer server answers beyond these is left out."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class JobMetadata(Reply):
    """generation moves with each change of the spec; `tags` and `note` are what people wrote at the job."""

    name: str
    namespace: str
    project: str
    owner: str
    uid: str
    labels: dict[str, str]
    generation: int
    creation_timestamp: Time
    tags: list[str] = []
    note: str = ""


class Job(Reply):
    """A job. Its spec has all defaults, and shows values of secret-looking variables, and to everybody but its owner
    those of all variables, as ***. `cost` is that of the
    attempts in the status, as far as its ledger is closed. `handed_over` says that the cluster has the job."""

    id: str
    api_version: str = API_VERSION
    kind: str = KIND
    metadata: JobMetadata
    spec: JobSpec
    status: JobStatus
    cost: Bill
    handed_over: bool


class JobSummary(Reply):
    """A line of the list. `goodput` is the productive share of the seconds so far. A job in the queue is expected to
    start in `starts_in_seconds`, null where that is not known."""

    id: str
    name: str
    namespace: str
    project: str
    owner: str
    labels: dict[str, str]
    task: str
    phase: str
    code: str
    because: str
    attempt: int
    step: int | None
    steps: int | None
    loss: float | None
    evaluation_loss: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    starts_in_seconds: float | None = None
    restarts: int
    checkpoint_step: int | None
    wanted: int
    ready: int
    suspend: bool
    cancel: bool
    priority: int
    created_at: Time
    started_at: Time | None
    finished_at: Time | None
    goodput: float | None
    tags: list[str] = []
    note: str = ""


class JobList(Reply):
    """`next_cursor` asks for the next page; it is null on the last."""

    items: list[JobSummary]
    next_cursor: str | None


class PlannedJob(Reply):
    name: str
    namespace: str
    project: str
    labels: dict[str, str]
    spec: JobSpec


class Finding(Reply):
    code: str
    path: str
    message: str


class Accumulation(Reply):
    """Gradient accumulation on so many nodes: an optimizer step takes `micro_steps` forward and backward passes."""

    nodes: int
    ranks: int
    micro_steps: int


class Range(Reply):
    min: int
    max: int


class PlannedEviction(Reply):
    """A gang that would be asked to commit and make room; of a project that the caller may not see `id` and `job` are
    null. It gives up `gpus` on `nodes` and goes on with `nodes_kept`, or is stopped and queues again. Its restart costs
    `restart_gpu_seconds`; `uncommitted_gpu_seconds` is its work since its last checkpoint, lost if it can't save."""

    project: str
    id: str | None
    job: str | None
    gpus: int
    nodes: int
    nodes_kept: int
    uncommitted_gpu_seconds: float
    restart_gpu_seconds: float
    because: str


class Admission(Reply):
    """Prediction of the queue for the job: it `starts` on so many nodes, `waits`, `preempts` the gangs of
    `evictions` (which `allowed_by` lets it), or stays `suspended`. `unknown` where the operator can't be asked."""

    verdict: Literal["starts", "waits", "preempts", "suspended", "unknown"]
    code: str
    because: str
    nodes: int
    allowed_by: str | None
    evictions: list[PlannedEviction]


class Plan(Reply):
    """Plan of a submission. `parameters` is null where the model's shape comes from a checkpoint or a folder, and
    `admission` where the job would be refused. Of a program `parameters` and `samplesPerStep` are null, and
    `accumulation` is empty.

    `refusals` say why a submission would be refused. `faults` say why the job would fail at its start, as far as the
    server can read its model and data. `estimate` has memory, time and price, and is null where `notEstimated` says
    why, and where there are refusals or the model can't be trained. `warnings` has those of the estimate too."""

    accepted: bool
    job: PlannedJob
    parameters: int | None
    ranks_per_node: int
    world_size: Range
    accumulation: list[Accumulation]
    samples_per_step: int | None
    admission: Admission | None = None
    refusals: list[Finding]
    faults: list[Finding] = []
    warnings: list[Finding]
    estimate: Estimate | None = None
    not_estimated: str = ""


class AttemptList(Reply):
    """`costs` has the bill of each item, in the same order, and `cost` that of all together."""

    items: list[Attempt]
    costs: list[Bill]
    cost: Bill


class Event(Reply):
    """Something that happened to a job. Its `id` counts 1, 2, 3 … within the job."""

    id: int
    job_id: str
    type: str
    at: Time
    attempt: int | None
    message: str
    data: dict[str, Any]


class EventList(Reply):
    """Send `last_id` as `after` for the next ones."""

    items: list[Event]
    last_id: int


class Point(Reply):
    """contract.signals.StepRecord; a number that is not finite is null."""

    attempt: int
    step: int
    at: Time | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    evaluation_loss: float | None = None
    values: dict[str, float] = Field(default={})
    evaluation_values: dict[str, float] = Field(default={})


class EvaluationPoint(Reply):
    step: int
    attempt: int
    loss: float | None
    values: dict[str, float] = Field(default={})
    at: Time | None = None


class History(Reply):
    """`total` is how many steps were recorded after `afterStep`, before they were thinned out."""

    points: list[Point]
    evaluations: list[EvaluationPoint]
    total: int
    downsampled: bool


class LogPage(Reply):
    """A piece of a log. Offsets are in bytes; `complete` says that this worker will write no more. `attempt` is null
    where none has begun."""

    attempt: int | None
    worker: int
    attempts: list[int]
    workers: list[int]
    text: str
    offset: int
    next_offset: int
    complete: bool


class NodeHolder(Reply):
    """Job that holds nodes which a queued job could use. It is expected to end in `eta_seconds`, null where that is not
    known. `job` and `id` are null for a job that the caller may not see."""

    project: str
    id: str | None
    job: str | None
    nodes: int
    gpus: int
    eta_seconds: float | None


class QueuePlace(Reply):
    """`position` 1 is next. Jobs queue by priority, then by age; those that need less may still go first. Of a job that
    waits for nodes `holders` have them, it is expected to start in `starts_in_seconds`, null where that is not known,
    and `expected` says both in words."""

    position: int
    ahead: int
    queued: int
    starts_in_seconds: float | None = None
    expected: str = ""
    holders: list[NodeHolder] = []


class Why(Reply):
    """Explanation of a job's state: `code` for programs, `because` in words, `since` when it has been in its phase. No
    attempt begins before `retry_at`; `next` says what to do. Of a training that succeeded `best` says which checkpoint
    is the best, and `warnings` what makes it doubtful that it has learnt."""

    id: str
    name: str
    phase: str
    code: str
    because: str
    since: Time
    attempt: int
    queue: QueuePlace | None
    last_failure: Failure | None
    retry_at: Time | None
    restarts: Restarts
    best: str = ""
    warnings: list[str] = []
    next: list[str]


class SamplesReply(Reply):
    """`total` evaluations have samples; `items` holds the newest of them, oldest first."""

    items: list[Samples]
    total: int


class CheckpointEvaluation(Reply):
    """Evaluation of a checkpoint: `evaluation` and `evaluation_id` name the job that asked for it, `job_id` the one
    that made it. `reason` says why there are no `results`."""

    evaluation: str
    evaluation_id: str
    job_id: str | None
    phase: str
    results: dict[str, float]
    reason: str | None


class _Summary(Reply):
    """`bytes` are those of all files of the checkpoint; `added_bytes` leave out what earlier checkpoints have too, so
    that they add up to what the folder takes. `tokens` were trained until then. `kind` is `tensors` for a checkpoint of
    Muster's trainer, and `folder` for files that a program of the user's own wrote."""

    step: int
    kind: Literal["tensors", "folder"]
    attempt: int
    committed_at: Time
    world_size: int
    tokens: int
    metrics: dict[str, float]
    best: bool
    bytes: int
    added_bytes: int
    pinned: bool
    uri: str
    evaluations: list[CheckpointEvaluation]


class Checkpoint(_Summary):
    """A line of the list; `files` is how many files the checkpoint has."""

    files: int


class CheckpointList(Reply):
    """`uri` is the job's folder, and `reason` says why it could not be looked into."""

    uri: str | None
    items: list[Checkpoint]
    reason: str | None


class CheckpointFile(Reply):
    """`key` is relative to the job's folder; `checksum` is the CRC-32 of the whole file, in hex."""

    key: str
    bytes: int
    checksum: str
    part_bytes: int | None


class CheckpointTensor(Reply):
    """`dtype` is spelt as safetensors does; `slices` is how many chunks the files hold of the tensor."""

    dtype: str
    shape: list[int]
    slices: int


class CheckpointDetail(_Summary):
    """Contents of a checkpoint. The model's weights have so many `elements`, and all tensors, the optimizer's too, take
    `tensor_bytes`. `cursor` says where the data stands, and `config` is the job's training."""

    job: str
    job_uid: str
    mesh: dict[str, Any]
    files: list[CheckpointFile]
    elements: int
    tensor_bytes: int
    tensors: dict[str, CheckpointTensor]
    cursor: dict[str, Any]
    config: dict[str, Any]
    architecture: dict[str, Any]
    versions: dict[str, str]


class Pin(Reply):
    """`changed` says whether this request made the difference."""

    step: int
    pinned: bool
    changed: bool
