"""`/queues` and `/nodes` over the API: what the operator told, and what each caller may see of it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.integration.api.people import settle
from tests.integration.api.platform import platform, until

from muster.words.fleet import FleetReport, NodeReport
from muster.words.status import GangStatus, Phase


async def test_two_people_see_their_own_jobs_on_the_same_node(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", auth=True) as here:
        people = await settle(here, tmp_path / "state")
        empty = (await people.ask("nlp-viewer", "GET", "/nodes")).json()
        assert (empty["asOf"], empty["items"]) == (None, [])
        assert "told nothing" in empty["note"]
        here.cluster.write_nodes(FleetReport(at=time.time(), nodes=(NodeReport(name="a", pool="p", capacity="spot"),)))

        async def handed_over() -> bool:
            jobs = [(await people.ask("admin", "GET", f"/jobs/{uid}")).json() for uid in people.jobs.values()]
            return all(job["handedOver"] for job in jobs)

        await until(handed_over, "the hand-over")
        here.operate(people.jobs["cv"], phase=Phase.RUNNING, gang=GangStatus(wanted=1, nodes=("a",)))

        async def held() -> list[str]:
            return [
                each["project"]
                for each in (await people.ask("nlp-viewer", "GET", "/nodes")).json()["items"][0]["heldBy"]
            ]

        assert await until(held, "the node's holder") == ["another project"]
        mine = (await people.ask("cv-viewer", "GET", "/nodes")).json()["items"][0]["heldBy"]
        assert [(each["project"], each["job"]) for each in mine] == [("cv", "cv-job")]
        queues = (await people.ask("nlp-viewer", "GET", "/queues")).json()
        assert [each["project"] for each in queues["items"]] == ["nlp"]
        assert [job["name"] for job in queues["items"][0]["waiting"]] == ["nlp-job"]
        theirs = (await people.ask("cv-viewer", "GET", "/queues")).json()["items"]
        assert [(each["project"], [job["name"] for job in each["holding"]]) for each in theirs] == [("cv", ["cv-job"])]
        here.cluster.write_nodes(FleetReport(at=time.time() - 600.0))
        assert "is it running?" in (await people.ask("nlp-viewer", "GET", "/nodes")).json()["note"]
