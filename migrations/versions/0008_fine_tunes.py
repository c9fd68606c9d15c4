"""fine_tunes: what OpenAI's clients asked for, beside the jobs that it became."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "fine_tunes",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("retried", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_fine_tunes_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_fine_tunes")),
    )
    op.create_table(
        "fine_tune_metadata",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=512), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["fine_tunes.job_id"],
            name=op.f("fk_fine_tune_metadata_job_id_fine_tunes"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", "key", name=op.f("pk_fine_tune_metadata")),
    )
    op.create_index("ix_fine_tune_metadata_key", "fine_tune_metadata", ["key", "value"], unique=False)


def downgrade() -> None:
    op.drop_table("fine_tune_metadata")
    op.drop_table("fine_tunes")
