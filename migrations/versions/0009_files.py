"""files: what people upload, and which jobs read it."""

import sqlalchemy as sa
from alembic import op

from muster.api.core.database.db import JsonText

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("seq", SERIAL, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=True),
        sa.Column("key", sa.String(160), nullable=True),
        sa.Column("told", sa.String(2048), nullable=False),
        sa.Column("fault", sa.String(1024), nullable=True),
        sa.Column("checked", JsonText(), nullable=True),
        sa.Column("lifetime_seconds", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name="fk_files_project_projects"),
        sa.PrimaryKeyConstraint("seq", name="pk_files"),
        sa.UniqueConstraint("id", name="uq_files_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_files_project", "files", ["project", "seq"])
    op.create_index("ix_files_status", "files", ["status", "seq"])
    op.create_index("ix_files_key", "files", ["key"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "job_files",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("file_id", sa.String(64), nullable=False),
        sa.Column("address", sa.String(2048), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_files_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "file_id", name="pk_job_files"),
    )
    op.create_index("ix_job_files_file_id", "job_files", ["file_id"])


def downgrade() -> None:
    op.drop_table("job_files")
    op.drop_table("files")
