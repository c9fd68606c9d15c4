"""an index for the list of jobs, which shows those that hold nodes before those that wait."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_jobs_listed", "jobs", ["live", sa.text("(phase NOT IN ('Queued', 'Suspended'))"), "seq"])


def downgrade() -> None:
    op.drop_index("ix_jobs_listed", "jobs")
