"""usage: what attempts held, which outlives their jobs' records. Those that there are are entered from their rows."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

from muster.words.quantities import quantity
from muster.words.times import epoch_seconds

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    usage = op.create_table(
        "usage",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("person", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=True),
        sa.Column("workers", sa.BigInteger(), nullable=False),
        sa.Column("gpus_per_worker", sa.BigInteger(), nullable=False),
        sa.Column("cpus_per_worker", sa.Float(), nullable=False),
        sa.Column("instance_type", sa.String(length=64), nullable=False),
        sa.Column("capacity", sa.String(length=16), nullable=False),
        sa.Column("lost_seconds", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", name=op.f("pk_usage")),
    )
    op.create_index("ix_usage_project", "usage", ["project", "until"], unique=False)
    query = sa.text(
        "SELECT jobs.id, jobs.project, jobs.owner, jobs.name, jobs.spec, jobs.finished_at, attempts.number, attempts.body "
        "FROM attempts JOIN jobs ON jobs.id = attempts.job_id"
    )
    rows = [_row(found) for found in op.get_bind().execute(query).all()]
    if held := [row for row in rows if row is not None]:
        op.bulk_insert(usage, held)


def downgrade() -> None:
    op.drop_table("usage")


def _row(found: Any) -> dict[str, Any] | None:
    """None for an attempt that holds nothing yet, and for one in words that can't be read."""
    try:
        attempt, gang = json.loads(found.body), json.loads(found.spec).get("gang") or {}
        if attempt.get("outcome") == "waiting":
            return None
        until, gpus = attempt.get("endedAt"), int(attempt.get("gpusPerWorker") or 0)
        seconds = attempt.get("seconds") or {}
        return {
            "job_id": found.id,
            "attempt": found.number,
            "project": found.project,
            "person": found.owner,
            "name": found.name,
            "since": epoch_seconds(attempt["createdAt"]),
            "until": found.finished_at if until is None else epoch_seconds(until),
            "workers": int(attempt.get("workers") or 0),
            "gpus_per_worker": gpus,
            "cpus_per_worker": 0.0 if gpus else quantity((gang.get("resources") or {}).get("cpu")),
            "instance_type": str(attempt.get("instanceType") or "")[:64],
            "capacity": attempt.get("capacity") or "on-demand",
            "lost_seconds": float(seconds.get("lost", 0.0)) + float(seconds.get("stalled", 0.0)),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
