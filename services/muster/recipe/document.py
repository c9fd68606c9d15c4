"""The TrainingJob: what an ML engineer asks for and what the platform carries."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from muster.recipe.foreign_names import with_hint
from muster.recipe.training import TrainingConfig
from muster.words.base import DocumentProblem, InvalidDocument, Record, Spec, UserError, parse
from muster.words.fields import Count, Positive, Text
from muster.words.gang import Gang
from muster.words.job import (
    CheckpointSpec,
    Metadata,
    Past,
    Recovery,
    Runtime,
    past_of,
)
from muster.words.names import GROUP, JOB_NAME, KIND, VERSION
from muster.words.pods import label_key, label_value
from muster.words.program import Program
from muster.words.redaction import masked_paths
from muster.words.status import DataSkip, JobStatus
from muster.words.tracking import WANDB_KEY, Tracking

LABELS_MAX = 64


# What a JobSpec says when it names no work or two kinds of it; the CRD's rule says the same.
ONE_KIND_OF_WORK = "give exactly one of training (Muster's own trainer) and program (a program of your own)"
ONLY_PROGRAMS_HAVE_FOLDERS = "checkpoint.folder is where a program writes its checkpoints; leave it out with training"


class JobSpec(Spec):
    """Desired state of a job: its training or its program, its gang, its checkpoints and its recovery."""

    training: TrainingConfig | None = None
    """Configuration of Muster's own trainer; exactly one of `training` and `program` is given."""
    program: Program | None = None
    """A program of your own; exactly one of `training` and `program` is given."""
    gang: Gang = Gang()
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: Recovery = Recovery()
    tracking: Tracking = Tracking()
    runtime: Runtime = Runtime()
    suspend: bool = False
    """Whether the job is to commit, give its nodes back and wait."""
    cancel: bool = False
    """Whether the job is to end and keep its record; deleting the object removes both."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    """Jobs of a higher priority get nodes first."""
    priority_class_name: Text | None = None
    """A PriorityClass of the cluster, whose value counts instead of `priority`."""
    active_deadline_seconds: Positive | None = None
    """Seconds after which a job that has not ended fails."""
    ttl_seconds_after_finished: Count | None = None
    """Seconds after its end when the job's object is deleted; left out, never."""

    @model_validator(mode="after")
    def _one_kind_of_work(self) -> Self:
        if (self.training is None) == (self.program is None):
            raise ValueError(ONE_KIND_OF_WORK)
        return self

    @model_validator(mode="after")
    def _asks_of_a_program_what_it_can_do(self) -> Self:
        """Refuse settings that Muster's own trainer alone obeys, and those that it alone does not."""
        if self.program is None:
            if self.checkpoint.folder is not None:
                raise ValueError(ONLY_PROGRAMS_HAVE_FOLDERS)
            return self
        if self.checkpoint.every != "auto":
            raise ValueError("checkpoint.every: a program saves when it chooses to; leave it out")
        if self.tracking != Tracking():
            raise ValueError("tracking: Muster's own trainer alone writes to trackers; let the program do so itself")
        return self

    @model_validator(mode="after")
    def _float8_needs_gpus(self) -> Self:
        if self.training is None:
            return self
        if self.training.precision == "fp8" and not self.gang.gpus_per_node:
            raise ValueError(
                "training.precision fp8 is for GPUs of compute capability 8.9 or more, and gang.gpusPerNode 0 trains "
                "on CPUs, which have no float8; ask for GPUs, or take bf16"
            )
        return self

    @model_validator(mode="after")
    def _trackers_have_their_tokens(self) -> Self:
        """Refuse a tracker without its token, but only if it is certain that there is none: a variable may come from
        `envFrom`, too."""
        wandb, runtime = self.tracking.wandb, self.runtime
        named = {variable.name for variable in runtime.env}
        if wandb is not None and wandb.mode == "online" and not runtime.env_from and WANDB_KEY not in named:
            raise ValueError(
                f"tracking.wandb needs its token in {WANDB_KEY}: keep it by `muster secrets set wandb`, and give "
                f"runtime.env: [{{name: {WANDB_KEY}, valueFrom: {{secretKeyRef: {{name: wandb, key: value}}}}}}]; or "
                "set tracking.wandb.mode to offline"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        """Check that every gang size from min to max can divide the batch: otherwise elasticity would change the
        result. That a program computes the same on each of them is its own promise."""
        for nodes in range(self.gang.nodes.min, self.gang.nodes.max + 1):
            try:
                self.accumulation(nodes)
            except ValueError as error:
                if nodes == self.gang.nodes.min:
                    raise ValueError(f"{error} (gang.nodes {nodes})") from None
        return self

    def gang_sizes(self) -> tuple[int, ...]:
        """The node counts, ascending, that min, max and the divisibility of batch and model copies allow; of a program
        all from min to max."""
        return tuple(n for n in range(self.gang.nodes.min, self.gang.nodes.max + 1) if self._divides_the_batch(n))

    @property
    def training_config(self) -> TrainingConfig:
        """Return the configuration of Muster's own trainer. Raises UserError for a job that runs a program."""
        if self.training is None:
            raise UserError("this job runs a program of its own (spec.program), not Muster's trainer")
        return self.training

    def _divides_the_batch(self, nodes: int) -> bool:
        try:
            self.accumulation(nodes)
        except ValueError:
            return False
        return True

    def accumulation(self, nodes: int) -> int:
        """Micro-steps per optimizer step on `nodes` nodes; 1 for a program. Raises ValueError when the batch or the
        model's copies can't be divided over their ranks."""
        if self.training is None:
            return 1
        size = self.training.data_parallel_size(nodes * self.gang.ranks_per_node)
        self.training.replicas(size, nodes)
        return self.training.accumulation(size)


# What a running job may change; everything else decides what is computed or where, and is fixed at submission.
MUTABLE = frozenset(
    {
        "suspend",
        "cancel",
        "priority",
        "priority_class_name",
        "recovery",
        "active_deadline_seconds",
        "ttl_seconds_after_finished",
    }
)


class TrainingJob(Record):
    api_version: str = f"{GROUP}/{VERSION}"
    kind: str = KIND
    metadata: Metadata
    spec: JobSpec
    status: JobStatus = JobStatus()


class WorkerConfig(Record):
    """Configuration of a worker: the part of its job that it needs, as JSON in MUSTER_CONFIG."""

    training: TrainingConfig | None = None
    program: Program | None = None
    checkpoint: CheckpointSpec
    past: Past | None = None
    tracking: Tracking = Tracking()
    data_skip: DataSkip | None = None  # applies where training begins after that very commit


def worker_config(spec: JobSpec, status: JobStatus) -> WorkerConfig:
    """Return the document that the workers of the job's next attempt get."""
    return WorkerConfig(
        training=spec.training,
        program=spec.program,
        checkpoint=spec.checkpoint,
        past=past_of(status),
        tracking=spec.tracking,
        data_skip=status.data_skip,
    )


class Submission(Record):
    """A parsed job document: `{apiVersion, kind, metadata: {name, …}, spec}`."""

    name: str
    namespace: str | None = None
    labels: dict[str, str] = {}
    spec: JobSpec


def parse_job(document: object) -> Submission:
    """Parse a TrainingJob document as people write it. Raises InvalidDocument naming every fault with its path."""
    if not isinstance(document, dict):
        parse(JobSpec, document)
        raise AssertionError("unreachable: parse refuses what is not a mapping")
    faults: list[DocumentProblem] = []
    allowed = {"apiVersion", "kind", "metadata", "spec"}
    faults += [DocumentProblem(str(key), "unknown key") for key in document if key not in allowed | {"status"}]
    if (version := document.get("apiVersion", f"{GROUP}/{VERSION}")) != f"{GROUP}/{VERSION}":
        faults.append(DocumentProblem("apiVersion", f"must be {GROUP}/{VERSION}, not {version!r}"))
    if (kind := document.get("kind", KIND)) != KIND:
        faults.append(DocumentProblem("kind", f"must be {KIND}, not {kind!r}"))
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    name, labels = metadata.get("name"), metadata.get("labels")
    labels = {} if labels is None else labels
    if metadata is not document.get("metadata") and document.get("metadata") is not None:
        faults.append(DocumentProblem("metadata", "must be a mapping of keys to values"))
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        rule = "lower-case letters, digits and dashes, starting with a letter, at most 48 characters"
        faults.append(DocumentProblem("metadata.name", f"must be {rule}, not {name!r}"[:300]))
    if not isinstance(labels, dict) or not all(isinstance(part, str) for pair in labels.items() for part in pair):
        faults.append(DocumentProblem("metadata.labels", "must map text to text"))
        labels = {}
    faults += _label_faults(labels)
    namespace = metadata.get("namespace")
    if namespace is not None and (not isinstance(namespace, str) or not JOB_NAME.fullmatch(namespace)):
        faults.append(DocumentProblem("metadata.namespace", f"is not a valid namespace: {namespace!r}"[:300]))
    hidden = "is hidden (***), as `muster get --spec` shows it; put the real value in its place"
    faults += [DocumentProblem(path, hidden) for path in masked_paths(document.get("spec"), "spec")]
    spec, count = None, len(faults)
    try:
        if document.get("spec") is None:
            raise InvalidDocument((DocumentProblem("spec", "is required"),))
        spec = parse(JobSpec, document["spec"], "spec")
    except InvalidDocument as invalid:
        faults += (with_hint(problem, JobSpec, "spec") for problem in invalid.problems)
        count += invalid.count
    if faults or spec is None:
        raise InvalidDocument(faults, count)
    return Submission(name=str(name), namespace=namespace, labels=labels, spec=spec)


def _label_faults(labels: dict[str, str]) -> list[DocumentProblem]:
    """Kubernetes' own limits, so that a job that is accepted can be made there."""
    if len(labels) > LABELS_MAX:
        return [DocumentProblem("metadata.labels", f"must be at most {LABELS_MAX}, not {len(labels):,}")]
    faults = []
    for key, value in labels.items():
        for check, text, what in ((label_key, key, "the key "), (label_value, value, "")):
            try:
                check(text)
            except ValueError as error:
                faults.append(DocumentProblem(f"metadata.labels.{key[:80]}", f"{what}{error}"[:400]))
    return faults
