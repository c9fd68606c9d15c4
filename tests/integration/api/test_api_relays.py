"""More than one relay on one database."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import select
from tests.integration.api.platform import Platform

from muster.api.core import relay
from muster.api.core.database.tables import JobRow


@pytest.mark.both_databases
async def test_two_relays_that_lose_one_name_tell_of_it_once(here: Platform) -> None:
    job = await here.submit("demo")
    await here.handed_over(job["id"])
    async with here.services.database.write() as session:
        row = (await session.scalars(select(JobRow).where(JobRow.id == job["id"]))).one()
        row.spec_version += 1
        row.relay_after = time.time() + 3600.0  # the relay of this API leaves it alone
    for _ in range(2):
        async with here.services.database.write() as session:
            await relay._fail(session, row, "another")
    assert (await here.events(job["id"])).count("job.failed") == 1
