"""A job writes in its worker's folder: what it links there is neither read nor waited for by the platform."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.integration.api.people import bearer, settle
from tests.integration.api.platform import platform, until

from muster.api.core.callers import ANONYMOUS
from muster.api.openai.chat.service import place_of
from muster.web.app import create_app
from muster.words.names import LOG, STEP_LOG

PAGE = {"accept": "text/html"}


@pytest.mark.parametrize("planted", ["link", "fifo"])
async def test_a_log_that_is_no_file_of_the_job_is_not_read(tmp_path: Path, planted: str) -> None:
    """It could name the token of the machine's user, which a job of anybody could then ask for."""
    state = tmp_path / "state"
    async with platform(state, make=create_app, auth=True) as here:
        people = await settle(here, state)
        uid, token = people.jobs["nlp"], here.state.admin_token
        secret = token.read_text().strip()
        folder = here.state.worker(uid, 1, 0)
        folder.mkdir(parents=True)
        for name in (LOG, STEP_LOG):
            (folder / name).symlink_to(token) if planted == "link" else os.mkfifo(folder / name)
        reader = people.headers["nlp-viewer"]

        async def handed_over() -> bool:  # from then on its pages say the same of it
            return bool((await people.ask("admin", "GET", f"/jobs/{uid}")).json()["handedOver"])

        await until(handed_over, "the hand-over")
        for path, headers in (
            (f"/api/v1/jobs/{uid}/logs", {}),
            (f"/api/v1/jobs/{uid}/logs?tail=10", {}),
            (f"/api/v1/jobs/{uid}/metrics", {}),
            (f"/api/v1/jobs/{uid}/curves", {}),
            (f"/jobs/{uid}/logs", PAGE),
            (f"/jobs/{uid}/logs?offset=0", PAGE),
            (f"/jobs/{uid}/logs/download", PAGE),
            ("/jobs", PAGE),
        ):
            reply = await here.client.get(path, headers={**reader, **headers})
            assert reply.status_code in (200, 404, 422), (path, reply.text)
            assert secret not in reply.text, path
        pages = [
            (await here.client.get(f"/jobs/{uid}/logs?find={text}", headers={**reader, **PAGE})).text.replace(text, "")
            for text in (secret[:12], "x" * 12)
        ]
        found, missing = (re.sub(r'<meta name="muster-now" content="[0-9.]+">', "", page) for page in pages)
        assert found == missing, "a search that finds tells what is in it"
        assert (await here.client.get("/api/v1/me", headers=bearer(secret))).status_code == 200


async def test_the_model_of_a_job_is_asked_for_as_a_jobs(tmp_path: Path) -> None:
    """Whatever else lies in the folder that the job wrote (trainer/convert/load_model.py)."""
    async with platform(tmp_path / "state", chat_workers=1) as here:
        uid = (await here.submit())["id"]
        await here.handed_over(uid)
        here.commit(uid, 20)
        place = await place_of(here.services, ANONYMOUS, f"job:{uid}")
        assert (place.step, place.of_job, uid in place.address) == ("20", True, True)
