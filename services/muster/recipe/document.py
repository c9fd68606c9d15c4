"""The TrainingJob: what an ML engineer asks for and what the platform carries."""

from __future__ import annotations

from typing import Final

from muster.recipe.commits_read import commits_read
from muster.recipe.foreign_names import with_hint
from muster.recipe.training import TrainingConfig
from muster.words import job as words
from muster.words.base import DocumentProblem, InvalidDocument, Record, UserError, parse
from muster.words.model_sources import FromCommit
from muster.words.names import GROUP, JOB_NAME, KIND, VERSION
from muster.words.pods import label_key, label_value
from muster.words.redaction import masked_paths
from muster.words.rules import DocumentRule, refused_by

LABELS_MAX = 64


def _not_divided(it: JobSpec) -> str | None:
    """Check the smallest gang alone: larger ones that don't divide the batch are never chosen. That a program computes
    the same on each of them is its own promise."""
    nodes = it.gang.nodes.min
    fault = refused_by(lambda: it.accumulation(nodes))
    return fault and f"{fault} (gang.nodes {nodes})"


# What a gang and the training on it keep.
GANG_RULES: Final[tuple[DocumentRule[JobSpec], ...]] = (
    DocumentRule(
        "training.precision fp8 needs gang.gpusPerNode",
        lambda it: (
            it.training is not None
            and it.training.precision == "fp8"
            and not it.gang.gpus_per_node
            and "training.precision fp8 is for GPUs of compute capability 8.9 or more, and gang.gpusPerNode 0 trains "
            "on CPUs, which have no float8; ask for GPUs, or take bf16"
        ),
    ),
)
BATCH_RULES: Final[tuple[DocumentRule[JobSpec], ...]] = (
    DocumentRule(
        "training.batch.tokensPerStep and training.parallel.replicas divide over the ranks of gang.nodes",
        _not_divided,
    ),
)


class JobSpec(words.JobSpec):
    """Desired state of a job: its training or its program, its gang, its checkpoints and its recovery."""

    rules = (*words.WORK_RULES, *GANG_RULES, *words.TRACKER_RULES, *BATCH_RULES)

    training: TrainingConfig | None = None
    """Configuration of Muster's own trainer; exactly one of `training` and `program` is given."""

    def runs_on(self, nodes: int) -> bool:
        """Return whether batch and replicas of the model can be divided over so many nodes; of a program always."""
        try:
            self.accumulation(nodes)
        except ValueError:
            return False
        return True

    def input_commits(self) -> dict[str, FromCommit]:
        """Return the checkpoints that the job reads, by the path below `spec` of the field that names each."""
        if self.training is None:
            return super().input_commits()
        return {f"training.{path}": origin for path, origin in commits_read(self.training).items()}

    @property
    def training_config(self) -> TrainingConfig:
        """Return the configuration of Muster's own trainer. Raises UserError for a job that runs a program."""
        if self.training is None:
            raise UserError("this job runs a program of its own (spec.program), not Muster's trainer")
        return self.training

    def accumulation(self, nodes: int) -> int:
        """Micro-steps per optimizer step on `nodes` nodes; 1 for a program. Raises ValueError when the batch or the
        model's copies can't be divided over their ranks."""
        if self.training is None:
            return 1
        ranks = nodes * self.gang.ranks_per_node
        size = self.training.data_parallel_size(ranks)
        self.training.replicas(ranks, nodes)
        return self.training.accumulation(size)


class TrainingJob(words.TrainingJob):
    """A job with a spec whose training is understood."""

    spec: JobSpec


class WorkerConfig(words.WorkerConfig):
    """Configuration of a worker of Muster's own trainer, or of a program."""

    training: TrainingConfig | None = None


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
