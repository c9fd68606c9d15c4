"""Projects: who may do what in one, and what its jobs may name. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field, field_validator

from muster.recipe.commits_read import REFERENCE, second_models
from muster.recipe.document import JobSpec
from muster.recipe.training import TrainingConfig
from muster.words.address import AddressError, parse_address
from muster.words.base import DocumentProblem, Many, Spec
from muster.words.fields import FolderAddress, KmsKey, Positive, Text
from muster.words.gang import NODES_MAX
from muster.words.names import FILE_ID
from muster.words.quotas import ProjectQuota


def _prefix(text: str) -> str:
    address = parse_address(text)
    if ".." in address.path.split("/"):
        raise AddressError("must not go up with `..`")
    return text


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or "@" in parts.netloc:
        raise ValueError(f"must be https://host or https://host:port, not {text!r}"[:200])
    return f"{parts.scheme}://{parts.netloc.lower()}"


Prefix = Annotated[Text, AfterValidator(_prefix)]
Origin = Annotated[Text, AfterValidator(_origin)]
Size = Annotated[int, Field(gt=0, le=NODES_MAX)]


class ProjectLimits(Spec):
    """Limits on what the jobs of a project may name. Omitted fields are not limited, except `namespaces`,
    `service_accounts`, `secrets` and `claims`: of these the API lets a job name only those that are listed."""

    service_account: Text | None = None
    """The service account of every job's pods, and with it their cloud rights."""
    service_accounts: Many[Text] | None = None
    """Other service accounts that a job may name; one that ends with * means all that begin so."""
    secrets: Many[Text] | None = None
    """The Secrets of its namespace that a job may name, in addition to the project's own (`muster secrets`); * as
    above."""
    claims: Many[Text] | None = None
    """The PersistentVolumeClaims of its namespace that a job may mount; * as above."""
    namespaces: Many[Text] | None = None
    """Namespaces that the jobs of the project `default` may have, for that project alone; left out, `default`; * as
    above."""
    checkpoint_prefix: FolderAddress | None = None
    """The folder under which every job commits; jobs that name none commit there."""
    data_prefixes: Many[Prefix] | None = None
    """The addresses under which data, models and checkpoints of others are read; `builtin://` always is."""
    endpoints: Many[Origin] | None = None
    """The http(s) servers that values in `runtime.env` may name."""
    kms_key_id: KmsKey | None = None
    """The KMS key of every job's checkpoints and of uploaded files on S3."""
    queue: Text | None = None
    """The queue of jobs whose scheduler has queues and that name none."""
    gang_sizes: Many[Size] | None = None
    """The numbers of nodes that a gang may have."""
    instance_types: Many[Text] | None = None
    """The instance types that a gang may have; a job that names none may have any of these."""
    file_bytes: Positive | None = None
    """Total bytes that the files uploaded to it may take."""
    quota: ProjectQuota = ProjectQuota()
    """Limits of what its gangs, and each of its people, may hold at a time."""
    images: Many[Text] | None = None
    """The trainer's images; one that ends with * means all that begin so. The platform's default always is."""

    @field_validator("quota")
    @classmethod
    def _nobody_says_what_was_spent(cls, quota: ProjectQuota) -> ProjectQuota:
        if quota.spent is not None:
            raise ValueError("spent is counted by the API: leave it out")
        return quota


def with_defaults(spec: JobSpec, limits: ProjectLimits) -> JobSpec:
    """The job with what its project says where it says nothing itself."""
    changes: dict[str, object] = {}
    where: dict[str, object] = {}
    if limits.checkpoint_prefix and spec.checkpoint.uri is None:
        where["uri"] = limits.checkpoint_prefix
    if limits.kms_key_id and spec.checkpoint.kms_key_id is None:
        where["kms_key_id"] = limits.kms_key_id
    if where:
        changes["checkpoint"] = spec.checkpoint.model_copy(update=where)
    if limits.service_account and spec.runtime.service_account_name is None:
        changes["runtime"] = spec.runtime.model_copy(update={"service_account_name": limits.service_account})
    gang, scheduler = spec.gang, spec.gang.scheduler
    if limits.queue and scheduler.kind != "builtin" and scheduler.queue is None:
        gang = gang.model_copy(update={"scheduler": scheduler.model_copy(update={"queue": limits.queue})})
    if limits.instance_types and not gang.instance_types:
        gang = gang.model_copy(update={"instance_types": limits.instance_types})
    return spec.model_copy(update=changes | ({"gang": gang} if gang is not spec.gang else {}))


def limit_problems(spec: JobSpec, limits: ProjectLimits, project: str) -> tuple[DocumentProblem, ...]:
    """Return the job's violations of its project's limits, each with its path and what to change."""
    return tuple(
        DocumentProblem(f"spec.{path}", words) for path, words in _violations(spec, limits, f"project {project!r}")
    )


def _violations(spec: JobSpec, limits: ProjectLimits, project: str) -> Iterator[tuple[str, str]]:
    uri, below = spec.checkpoint.uri, limits.checkpoint_prefix
    if below and uri is not None and not is_under(uri, below):
        yield "checkpoint.uri", f"{project} commits under {below}; name a folder there, or leave it out"
    if limits.kms_key_id and spec.checkpoint.kms_key_id not in (None, limits.kms_key_id):
        yield "checkpoint.kmsKeyId", f"{project} encrypts its checkpoints by {limits.kms_key_id}; leave it out"
    if limits.data_prefixes is not None:
        allowed = ", ".join(limits.data_prefixes) or "builtin:// alone"
        own = (below,) if below else ()
        for path, address in read_addresses(spec):
            if not any(is_under(address, each) for each in (*limits.data_prefixes, *own)):
                yield path, f"{project} reads from {allowed}; copy it there, or ask an admin for another prefix"
    yield from _endpoint_problems(spec, limits, project)
    sizes = limits.gang_sizes
    if sizes is not None and not set(spec.gang_sizes()) <= set(sizes):
        yield "gang.nodes", f"{project} has gangs of {', '.join(map(str, sorted(sizes)))} nodes; choose one of these"
    types = limits.instance_types
    if types is not None and (unknown := [each for each in spec.gang.instance_types if each not in types]):
        yield "gang.instanceTypes", f"{project} has {', '.join(types)}, and not {', '.join(unknown)}; choose of these"
    image = spec.runtime.image
    if limits.images is not None and image is not None and not any(matches(image, each) for each in limits.images):
        yield "runtime.image", f"{project} has the images {', '.join(limits.images) or '(none)'}; choose one or none"


def _endpoint_problems(spec: JobSpec, limits: ProjectLimits, project: str) -> Iterator[tuple[str, str]]:
    if limits.endpoints is None:
        return
    for index, variable in enumerate(spec.runtime.env):
        parts = urlsplit(variable.value) if variable.value.lower().startswith(("http://", "https://")) else None
        if parts is not None and f"{parts.scheme}://{parts.netloc.lower()}" not in limits.endpoints:
            allowed = ", ".join(limits.endpoints) or "none"
            yield f"runtime.env[{index}].value", f"names another server than those of {project}: {allowed}"


def read_addresses(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield every address that the job reads, with its path; addresses that need no permission are left out."""
    addresses = [*_read_by_training(spec.training)] if spec.training is not None else [*_read_by_program(spec)]
    addresses += [(f"{path}.uri", origin.uri) for path, origin in spec.input_commits().items()]
    return ((path, text) for path, text in addresses if text is not None and not _is_ours(text))


def _read_by_program(spec: JobSpec) -> Iterator[tuple[str, str | None]]:
    if spec.program is not None:
        yield "program.source", spec.program.source
        for name, each in spec.program.inputs.items():
            yield f"program.inputs.{name}.source", each.source
        if spec.program.after is not None:
            yield "program.after.uri", spec.program.after.uri


def _read_by_training(training: TrainingConfig) -> Iterator[tuple[str, str | None]]:
    yield from (
        ("training.model.source", training.model.source),
        *(
            (f"training.{path}.source", second.source)
            for path, second in second_models(training).items()
            if path != REFERENCE  # which is named already
        ),
        ("training.data.tokenizer", training.data.tokenizer if training.data.tokenizer != "bytes" else None),
        ("training.data.chatTemplate", training.data.chat_template),
        *((f"training.{path}.source", source.source) for path, source in training.sources()),
    )


def _is_ours(text: str) -> bool:
    """Return the addresses that every project may read: what each installation has, and its own uploaded files."""
    return FILE_ID.fullmatch(text) is not None or parse_address(text).scheme == "builtin"


def is_under(text: str, prefix: str) -> bool:
    """Return whether the address is the prefix or lies below it, for those too who take a `..` in it, or one that is
    percent-encoded, at its word."""
    here, there = parse_address(text), parse_address(prefix)
    if (here.scheme, here.host) != (there.scheme, there.host) or ".." in unquote(text).split("/"):
        return False
    folder = there.path.rstrip("/")
    return not folder or here.path.rstrip("/") == folder or here.path.startswith(f"{folder}/")


def matches(name: str, allowed: str) -> bool:
    """Return whether the name is the allowed one, or matches its prefix if that ends with *."""
    return name.startswith(allowed[:-1]) if allowed.endswith("*") else name == allowed
