"""identity: the subject of the sign-in's provider by which a person is known."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("people", sa.Column("identity", sa.String(length=512), nullable=True))
    op.create_index("uq_people_identity", "people", ["identity"], unique=True)


def downgrade() -> None:
    op.drop_index("uq_people_identity", table_name="people")
    op.drop_column("people", "identity")
