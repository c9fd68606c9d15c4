"""How Alembic reaches the database: over the API's own connection at start, or over MUSTER_API_DATABASE_URL by hand."""

import asyncio

from alembic import context
from sqlalchemy import Connection

from muster.api.core.database.db import Database, JsonText
from muster.api.core.database.tables import Table
from muster.api.core.settings import ApiSettings


def plain_types(kind: str, item: object, context: object) -> str | bool:
    """A migration names the database's own types, so that it means the same when our classes have changed."""
    return "sa.Text()" if kind == "type" and isinstance(item, JsonText) else False


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Table.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
        render_item=plain_types,
    )
    with context.begin_transaction():
        context.run_migrations()


async def by_hand() -> None:
    settings = ApiSettings()
    database = Database(settings.database, settings.database_timeout_seconds)
    async with database.engine.begin() as connection:
        await connection.run_sync(run)
    await database.close()


if (given := context.config.attributes.get("connection")) is not None:
    run(given)
else:
    asyncio.run(by_hand())
