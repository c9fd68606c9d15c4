"""The tables. A change needs a migration (`alembic revision --autogenerate`); a test fails when the two part."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, ForeignKey, Index, Integer, MetaData, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from muster.api.core.database.db import JsonText

# SQLite counts rows by INTEGER only, and AUTOINCREMENT keeps it from giving a number twice.
Serial = BigInteger().with_variant(Integer(), "sqlite")


class Table(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {int: BigInteger(), dict[str, Any]: JsonText()}  # noqa: RUF012


# Whether the job of a row doesn't wait. A text, for only an expression that is the same to the letter is looked up in
# an index.
HOLDS_NODES = text("(phase NOT IN ('Queued', 'Suspended'))")


class JobRow(Table):
    """A job, with what is wanted of it (`spec`, the outbox) and what was last seen of it (`status`, the mirror).

    The row has yet to be relayed to the cluster while relayed_version < spec_version.
    """

    __tablename__ = "jobs"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)  # the order of submission
    id: Mapped[str] = mapped_column(String(64), unique=True)
    namespace: Mapped[str] = mapped_column(String(255))
    name: Mapped[str] = mapped_column(String(255))
    project: Mapped[str] = mapped_column(String(64), server_default="default")
    owner: Mapped[str] = mapped_column(String(64), server_default="admin")  # the person who submitted it
    labels: Mapped[dict[str, Any]]
    priority: Mapped[int]
    created_at: Mapped[float]
    live: Mapped[bool] = mapped_column(Boolean)  # it has not ended, and no other job may have its name
    deleted: Mapped[bool] = mapped_column(Boolean, default=False)

    spec: Mapped[dict[str, Any]]
    spec_version: Mapped[int] = mapped_column(default=1)
    relayed_version: Mapped[int] = mapped_column(default=0)
    relay_failures: Mapped[int] = mapped_column(default=0)
    relay_after: Mapped[float] = mapped_column(default=0.0)

    phase: Mapped[str] = mapped_column(String(64))
    status: Mapped[dict[str, Any]]
    status_version: Mapped[int] = mapped_column(default=0)  # the cluster's version of `status`; 0: never seen there
    finished_at: Mapped[float | None]
    # The number of the job's newest event. Numbers are given out under the row's lock, and so they have no gaps.
    last_event: Mapped[int] = mapped_column(default=0)
    # What people wrote at it, which the cluster never sees. `tags` are sorted, with blanks between them.
    tags: Mapped[str] = mapped_column(Text, server_default=text("''"))
    note: Mapped[str] = mapped_column(Text, server_default=text("''"))
    noted_at: Mapped[float | None]

    __table_args__ = (
        Index(
            "uq_jobs_live_name",
            "namespace",
            "name",
            unique=True,
            sqlite_where=text("live"),
            postgresql_where=text("live"),
        ),
        Index(
            "ix_jobs_to_relay",
            "relay_after",
            sqlite_where=text("relayed_version < spec_version"),
            postgresql_where=text("relayed_version < spec_version"),
        ),
        Index("ix_jobs_name", "name", "seq"),
        Index("ix_jobs_phase", "phase", "seq"),
        Index("ix_jobs_project", "project", "seq"),
        Index("ix_jobs_finished_at", "finished_at"),
        Index("ix_jobs_live", "live", "seq"),
        Index("ix_jobs_listed", "live", HOLDS_NODES, "seq"),
        Index("ix_jobs_noted_at", "noted_at"),
        {"sqlite_autoincrement": True},
    )


class LabelRow(Table):
    __tablename__ = "job_labels"

    job_seq: Mapped[int] = mapped_column(Serial, ForeignKey("jobs.seq", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(320), primary_key=True)
    value: Mapped[str] = mapped_column(String(256))

    __table_args__ = (Index("ix_job_labels_key", "key", "value"),)


class JobTagRow(Table):
    """A tag of a job, to find the job by. Written with the job's own `tags`, in one commit."""

    __tablename__ = "job_tags"

    job_seq: Mapped[int] = mapped_column(Serial, ForeignKey("jobs.seq", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(String(64), primary_key=True)

    __table_args__ = (Index("ix_job_tags_tag", "tag", "job_seq"),)


class EventRow(Table):
    """Events are only ever added. Their `number` counts 1, 2, 3 … within the job."""

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    type: Mapped[str] = mapped_column(String(64))
    at: Mapped[float]
    attempt: Mapped[int | None]
    body: Mapped[dict[str, Any]]  # {message, data}


class InputPinRow(Table):
    """A checkpoint that a job reads, which retention spares until the job is over. The row outlives its job until the
    mark in the folder is taken back."""

    __tablename__ = "input_pins"

    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    folder: Mapped[str] = mapped_column(Text)
    step: Mapped[int]
    renew_at: Mapped[float]


class EvaluationRow(Table):
    """A job whose program is run once for each checkpoint of another job. The API alone carries it out; the cluster
    never has it."""

    __tablename__ = "evaluations"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    target_id: Mapped[str] = mapped_column(String(64), index=True)  # the job whose checkpoints are evaluated
    granted: Mapped[str | None] = mapped_column(String(16))  # the owner's role, where the sign-in's provider gave it


class EvaluationRunRow(Table):
    """The job of an evaluation for one checkpoint, written with it in one commit: so there is one for each step."""

    __tablename__ = "evaluation_runs"

    evaluation_id: Mapped[str] = mapped_column(ForeignKey("evaluations.job_id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="SET NULL"), index=True)
    phase: Mapped[str] = mapped_column(String(64))  # the job's, as it was last seen; Refused: there is none
    results: Mapped[dict[str, Any]]  # the named numbers that it left
    fault: Mapped[str | None] = mapped_column(String(1024))  # why there are none


class AttemptRow(Table):
    """`body` is a words.status.Attempt. The status keeps the newest fifty, these rows keep all."""

    __tablename__ = "attempts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[dict[str, Any]]


class UsageRow(Table):
    """Resources that an attempt held, from its beginning until its last worker was gone (plan.usage.HeldNodes).

    Written with the attempt's row, and kept when the job's record is deleted: nothing here refers to it.
    """

    __tablename__ = "usage"

    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(String(64))
    person: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(255))  # the job's
    since: Mapped[float]
    until: Mapped[float | None]  # None while it holds its nodes
    workers: Mapped[int]
    gpus_per_worker: Mapped[int]
    cpus_per_worker: Mapped[float]
    instance_type: Mapped[str] = mapped_column(String(64))
    capacity: Mapped[str] = mapped_column(String(16))
    lost_seconds: Mapped[float]

    __table_args__ = (Index("ix_usage_project", "project", "until"),)


class IdempotencyRow(Table):
    """Reply to a request with this Idempotency-Key, written in the same transaction as the request's changes."""

    __tablename__ = "idempotency_keys"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    route: Mapped[str] = mapped_column(String(128), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    reply: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(index=True)


class FineTuneRow(Table):
    """A job that was asked for in OpenAI's words: `body` is openai.fine_tunes.Body, what was asked and what
    was chosen. Written with the job, in one commit.

    `retried` says that a retry made it, while the request that it repeats may still be on its way.
    """

    __tablename__ = "fine_tunes"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    body: Mapped[dict[str, Any]]
    retried: Mapped[bool] = mapped_column(Boolean)


class FineTuneMetadataRow(Table):
    """A pair of a fine-tuning job's `metadata`, to find the job by."""

    __tablename__ = "fine_tune_metadata"

    job_id: Mapped[str] = mapped_column(ForeignKey("fine_tunes.job_id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(512))

    __table_args__ = (Index("ix_fine_tune_metadata_key", "key", "value"),)


class TokenRow(Table):
    """`hash` is the token's SHA-256 in hex. The token itself is shown once and kept nowhere.

    `project` is the only one that it opens; None for every project of its person.
    """

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    person: Mapped[str] = mapped_column(String(64), ForeignKey("people.name"))
    project: Mapped[str | None] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[dict[str, Any]]  # {"scopes": [...]}
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class SessionRow(Table):
    """A browser that is signed in: by a token, or by the provider's word (`signed_in`). One of the two is None.

    `hash` is the SHA-256 in hex of what the browser's cookie holds; that itself is kept nowhere.
    """

    __tablename__ = "sessions"

    hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    token_id: Mapped[str | None] = mapped_column(String(64), ForeignKey("tokens.id", ondelete="CASCADE"))
    signed_in: Mapped[dict[str, Any] | None]  # signin.provider.SignedIn
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class ProjectRow(Table):
    """A project owns jobs. Its `namespace` is its jobs' alone; None for `default`, which has all that nobody has."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    namespace: Mapped[str | None] = mapped_column(String(64), unique=True)
    limits: Mapped[dict[str, Any]]  # api.core.limits.ProjectLimits
    created_at: Mapped[float]


class PersonRow(Table):
    """A person, or a service account. A name is never given to another, for jobs and records go by it."""

    __tablename__ = "people"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))  # person or service
    admin: Mapped[bool] = mapped_column(Boolean)
    disabled: Mapped[bool] = mapped_column(Boolean)  # no token of theirs opens anything
    created_at: Mapped[float]
    identity: Mapped[str | None] = mapped_column(String(512))  # who they are to the sign-in's provider

    __table_args__ = (Index("uq_people_identity", "identity", unique=True),)


class MemberRow(Table):
    """A person's role in a project."""

    __tablename__ = "members"

    project: Mapped[str] = mapped_column(String(64), ForeignKey("projects.name", ondelete="CASCADE"), primary_key=True)
    person: Mapped[str] = mapped_column(String(64), ForeignKey("people.name"), primary_key=True, index=True)
    role: Mapped[str] = mapped_column(String(16))


class SecretRow(Table):
    """A secret of a project: its name and the names of its entries. Their values are the cluster's to keep."""

    __tablename__ = "secrets"

    project: Mapped[str] = mapped_column(String(64), ForeignKey("projects.name", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    keys: Mapped[dict[str, Any]]  # {"keys": [...]}
    created_at: Mapped[float]
    changed_at: Mapped[float]
    changed_by: Mapped[str] = mapped_column(String(64))


class WebhookRow(Table):
    """Webhook of a project. `secret` and `old_secret` are encrypted (muster.secrets.box); messages are also signed with
    the old one until `old_secret_until`."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str] = mapped_column(String(64), ForeignKey("projects.name", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(64))
    url: Mapped[str] = mapped_column(String(2048))
    kinds: Mapped[dict[str, Any]]  # {"kinds": [words.webhooks.WebhookKind]}
    preset: Mapped[str | None] = mapped_column(String(16))
    wait_seconds: Mapped[float]
    enabled: Mapped[bool] = mapped_column(Boolean)
    secret: Mapped[str] = mapped_column(Text)
    old_secret: Mapped[str | None] = mapped_column(Text)
    old_secret_until: Mapped[float | None]
    created_at: Mapped[float]
    changed_at: Mapped[float]
    changed_by: Mapped[str] = mapped_column(String(64))

    __table_args__ = (Index("uq_webhooks_project", "project", "name", unique=True),)


class WebhookDeliveryRow(Table):
    """A message to one webhook, the outbox: it is written in the transaction of the change that it reports, and kept as
    the history.

    Whoever sends it moves `next_at` to when another process may, should this one be heard of no more.
    """

    __tablename__ = "webhook_deliveries"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)  # the message's, the same however often it is sent
    webhook_id: Mapped[str] = mapped_column(String(64), ForeignKey("webhooks.id", ondelete="CASCADE"))
    key: Mapped[str] = mapped_column(String(255))  # what it tells of
    kind: Mapped[str] = mapped_column(String(32))
    body: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(index=True)
    status: Mapped[str] = mapped_column(String(16))  # api.webhooks.schemas.Status
    tries: Mapped[int]
    next_at: Mapped[float]
    give_up_at: Mapped[float]
    delivered_at: Mapped[float | None]
    attempts: Mapped[dict[str, Any]]  # {"attempts": [api.webhooks.schemas.DeliveryAttempt]}, oldest first

    __table_args__ = (
        Index("uq_webhook_deliveries_key", "webhook_id", "key", unique=True),
        Index("ix_webhook_deliveries_webhook", "webhook_id", "seq"),
        Index(
            "ix_webhook_deliveries_due",
            "next_at",
            sqlite_where=text("status = 'waiting'"),
            postgresql_where=text("status = 'waiting'"),
        ),
        {"sqlite_autoincrement": True},
    )


class FileRow(Table):
    """A file of a project. While it is on its way its bytes lie in the folder of uploads under its id, and later under
    `key` with those of every file that is equal to it."""

    __tablename__ = "files"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    project: Mapped[str] = mapped_column(String(64), ForeignKey("projects.name"))
    owner: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(32))
    status: Mapped[str] = mapped_column(String(16))  # replies.files.FileStatus
    bytes: Mapped[int]
    sha256: Mapped[str | None] = mapped_column(String(64))  # what its sender says, or what has arrived
    key: Mapped[str | None] = mapped_column(String(160), index=True)  # storage.contents.Contents
    upload_metadata: Mapped[str] = mapped_column("told", String(2048))  # as it came
    fault: Mapped[str | None] = mapped_column(String(1024))  # why nothing can be learnt from it, with the place
    checked: Mapped[dict[str, Any] | None]  # storage.data_check.Checked
    lifetime_seconds: Mapped[float | None]
    created_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(index=True)

    __table_args__ = (
        Index("ix_files_project", "project", "seq"),
        Index("ix_files_status", "status", "seq"),
        {"sqlite_autoincrement": True},
    )


class JobFileRow(Table):
    """A file that a job's document names, and where its workers read it."""

    __tablename__ = "job_files"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    file_id: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)
    address: Mapped[str] = mapped_column(String(2048))


class SweepRow(Table):
    """A sweep. `document` holds what to try, and the job's document that its trials are made of, both as they came."""

    __tablename__ = "sweeps"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(String(64))
    project: Mapped[str] = mapped_column(String(64), ForeignKey("projects.name"))
    owner: Mapped[str] = mapped_column(String(64))
    granted: Mapped[str | None] = mapped_column(String(16))  # the owner's role, where the sign-in's provider gave it
    document: Mapped[dict[str, Any]]  # {"sweep": recipe.sweep.Sweep, "job": …}
    metric: Mapped[dict[str, Any]]  # recipe.sweep.SweepMetric, with its direction
    created_at: Mapped[float]
    live: Mapped[bool] = mapped_column(Boolean)  # there is something left to do
    cancelled: Mapped[bool] = mapped_column(Boolean)  # somebody asked for its end
    phase: Mapped[str] = mapped_column(String(16))  # recipe.sweep.SweepPhase
    summary: Mapped[dict[str, Any]]  # api.sweeps.schemas.Summary, for lists
    version: Mapped[int]  # counts what its controller wrote
    finished_at: Mapped[float | None]
    request: Mapped[str | None] = mapped_column(String(400), unique=True)  # its caller and their Idempotency-Key
    request_hash: Mapped[str] = mapped_column(String(64))

    __table_args__ = (
        Index(
            "uq_sweeps_live_name",
            "project",
            "name",
            unique=True,
            sqlite_where=text("live"),
            postgresql_where=text("live"),
        ),
        Index("ix_sweeps_project", "project", "seq"),
        Index("ix_sweeps_live", "seq", sqlite_where=text("live"), postgresql_where=text("live")),
        {"sqlite_autoincrement": True},
    )


class TrialRow(Table):
    """A trial of a sweep, written with its job in one commit: so there is one job for each number."""

    __tablename__ = "trials"

    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweeps.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="SET NULL"), index=True)
    phase: Mapped[str] = mapped_column(String(64))  # the job's, as it was last seen; Refused: there is none
    parameters: Mapped[dict[str, Any]]
    results: Mapped[dict[str, Any]]  # api.sweeps.decisions.Results
    stopped: Mapped[str | None] = mapped_column(String(1024))  # why it was told to stop, or refused


class AuditRow(Table):
    """Entry of the audit log: who did what, from where, before and after. The database refuses to change or delete an
    entry."""

    __tablename__ = "audit"

    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    at: Mapped[float]
    person: Mapped[str] = mapped_column(String(64))
    token: Mapped[str] = mapped_column(String(64))  # its id
    address: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(128))
    project: Mapped[str | None] = mapped_column(String(64))
    before: Mapped[dict[str, Any] | None]
    after: Mapped[dict[str, Any] | None]

    __table_args__ = (
        Index("ix_audit_project", "project", "seq"),
        Index("ix_audit_subject", "subject", "seq"),
        {"sqlite_autoincrement": True},
    )


class MirrorRow(Table):
    """Position up to which the cluster's history has been read. It moves in the transaction that stores what was
    read."""

    __tablename__ = "mirror"

    cluster: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int]
