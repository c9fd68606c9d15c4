"""secrets: named objects of a project, without their values."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "secrets",
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("keys", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.Column("changed_by", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["project"], ["projects.name"], name=op.f("fk_secrets_project_projects"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("project", "name", name=op.f("pk_secrets")),
    )


def downgrade() -> None:
    op.drop_table("secrets")
