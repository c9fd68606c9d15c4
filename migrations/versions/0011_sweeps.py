"""sweeps: many jobs of one document, and which trial of which sweep a job is."""

import sqlalchemy as sa
from alembic import op

from muster.api.core.database.db import JsonText

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "sweeps",
        sa.Column("seq", SERIAL, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("granted", sa.String(16), nullable=True),
        sa.Column("document", JsonText(), nullable=False),
        sa.Column("metric", JsonText(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("live", sa.Boolean(), nullable=False),
        sa.Column("cancelled", sa.Boolean(), nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("summary", JsonText(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("request", sa.String(400), nullable=True),
        sa.Column("request_hash", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name="fk_sweeps_project_projects"),
        sa.PrimaryKeyConstraint("seq", name="pk_sweeps"),
        sa.UniqueConstraint("id", name="uq_sweeps_id"),
        sa.UniqueConstraint("request", name="uq_sweeps_request"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "uq_sweeps_live_name",
        "sweeps",
        ["project", "name"],
        unique=True,
        sqlite_where=sa.text("live"),
        postgresql_where=sa.text("live"),
    )
    op.create_index("ix_sweeps_project", "sweeps", ["project", "seq"])
    op.create_index("ix_sweeps_live", "sweeps", ["seq"], sqlite_where=sa.text("live"), postgresql_where=sa.text("live"))
    op.create_table(
        "trials",
        sa.Column("sweep_id", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=True),
        sa.Column("phase", sa.String(64), nullable=False),
        sa.Column("parameters", JsonText(), nullable=False),
        sa.Column("results", JsonText(), nullable=False),
        sa.Column("stopped", sa.String(1024), nullable=True),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name="fk_trials_sweep_id_sweeps", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_trials_job_id_jobs", ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("sweep_id", "number", name="pk_trials"),
    )
    op.create_index("ix_trials_job_id", "trials", ["job_id"])


def downgrade() -> None:
    op.drop_table("trials")
    op.drop_table("sweeps")
