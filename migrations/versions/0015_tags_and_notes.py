"""tags and notes: what people write at a job, and an index for the list that begins with the live jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("tags", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("jobs", sa.Column("note", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("jobs", sa.Column("noted_at", sa.Float(), nullable=True))
    op.create_index("ix_jobs_noted_at", "jobs", ["noted_at"])
    op.create_index("ix_jobs_live", "jobs", ["live", "seq"])
    op.create_table(
        "job_tags",
        sa.Column("job_seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("tag", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["job_seq"], ["jobs.seq"], name="fk_job_tags_job_seq_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_seq", "tag", name="pk_job_tags"),
    )
    op.create_index("ix_job_tags_tag", "job_tags", ["tag", "job_seq"])


def downgrade() -> None:
    op.drop_table("job_tags")
    op.drop_index("ix_jobs_live", "jobs")
    op.drop_index("ix_jobs_noted_at", "jobs")
    for column in ("noted_at", "note", "tags"):
        op.drop_column("jobs", column)
