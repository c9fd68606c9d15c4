"""evaluations: jobs whose program is run for each checkpoint of another, and which job evaluates which checkpoint."""

import sqlalchemy as sa
from alembic import op

from muster.api.core.database.db import JsonText

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "evaluations",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("target_id", sa.String(64), nullable=False),
        sa.Column("granted", sa.String(16), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_evaluations_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_evaluations"),
    )
    op.create_index("ix_evaluations_target_id", "evaluations", ["target_id"])
    op.create_table(
        "evaluation_runs",
        sa.Column("evaluation_id", sa.String(64), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=True),
        sa.Column("phase", sa.String(64), nullable=False),
        sa.Column("results", JsonText(), nullable=False),
        sa.Column("fault", sa.String(1024), nullable=True),
        sa.ForeignKeyConstraint(
            ["evaluation_id"],
            ["evaluations.job_id"],
            name="fk_evaluation_runs_evaluation_id_evaluations",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_evaluation_runs_job_id_jobs", ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("evaluation_id", "step", name="pk_evaluation_runs"),
    )
    op.create_index("ix_evaluation_runs_job_id", "evaluation_runs", ["job_id"])


def downgrade() -> None:
    op.drop_table("evaluation_runs")
    op.drop_table("evaluations")
