"""input_pins: the checkpoints of other jobs that a job reads, which retention spares until it is over."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "input_pins",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("renew_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_input_pins"),
    )


def downgrade() -> None:
    op.drop_table("input_pins")
