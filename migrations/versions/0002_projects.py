"""projects, people, members; whose a job and a token are.

What was there before goes on as it did: jobs belong to the project `default` and to its first person, and a token to a
service account of its own with the role that its scopes gave it.
"""

import json
import time
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    now = time.time()
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("namespace", sa.String(length=64), nullable=True),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
        sa.UniqueConstraint("namespace", name=op.f("uq_projects_namespace")),
    )
    people = op.create_table(
        "people",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_people")),
    )
    members = op.create_table(
        "members",
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("person", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["project"], ["projects.name"], name=op.f("fk_members_project_projects"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["person"], ["people.name"], name=op.f("fk_members_person_people")),
        sa.PrimaryKeyConstraint("project", "person", name=op.f("pk_members")),
    )
    with op.batch_alter_table("members", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_members_person"), ["person"], unique=False)
    op.bulk_insert(projects, [{"name": "default", "namespace": None, "limits": "{}", "created_at": now}])
    op.bulk_insert(people, [_person("admin", "person", True, now)])
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.add_column(sa.Column("person", sa.String(length=64), nullable=True))
        batch_op.add_column(sa.Column("project", sa.String(length=64), nullable=True))
    _give_tokens_to_people(people, members, now)
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.alter_column("person", existing_type=sa.String(length=64), nullable=False)
        batch_op.create_foreign_key(batch_op.f("fk_tokens_person_people"), "people", ["person"], ["name"])
    # With defaults, for the rows that are there. Not by a batch, which on SQLite copies the table: dropping the old one
    # would take with it whatever points at its rows.
    op.add_column("jobs", sa.Column("project", sa.String(length=64), nullable=False, server_default="default"))
    op.add_column("jobs", sa.Column("owner", sa.String(length=64), nullable=False, server_default="admin"))
    op.create_index("ix_jobs_project", "jobs", ["project", "seq"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_jobs_project", "jobs")
    op.drop_column("jobs", "owner")
    op.drop_column("jobs", "project")
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.drop_constraint(batch_op.f("fk_tokens_person_people"), type_="foreignkey")
        batch_op.drop_column("project")
        batch_op.drop_column("person")
    op.drop_table("members")
    op.drop_table("people")
    op.drop_table("projects")


def _person(name: str, kind: str, admin: bool, now: float) -> dict[str, Any]:
    return {"name": name, "kind": kind, "admin": admin, "disabled": False, "created_at": now}


def _give_tokens_to_people(people: sa.Table, members: sa.Table, now: float) -> None:
    tokens = sa.table("tokens", *(sa.column(name) for name in ("id", "scopes", "person", "project")))
    for token in op.get_bind().execute(sa.select(tokens.c.id, tokens.c.scopes)).all():
        scopes = json.loads(token.scopes)["scopes"]
        person, project = "admin", None
        if "admin" not in scopes:
            person, project = f"token-{token.id[:8]}", "default"
            op.bulk_insert(people, [_person(person, "service", False, now)])
            role = "maintainer" if "write" in scopes else "viewer"
            op.bulk_insert(members, [{"project": project, "person": person, "role": role}])
        change = tokens.update().where(tokens.c.id == token.id).values(person=person, project=project)
        op.get_bind().execute(change)
