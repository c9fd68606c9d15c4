"""The pages of sweeps, as a browser without JavaScript reads them."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from tests.integration.api.platform import Platform, platform, until
from tests.integration.api.test_api_sweep_jobs import create, started, train
from tests.integration.web.pages import Browser, notes

from muster.api.sweeps.controller import SweepWork
from muster.web.app import create_app
from muster.words.status import Phase


async def swept(here: Platform) -> dict[str, Any]:
    """A sweep of four trials that have been evaluated; two of them train on."""
    sweep = await create(here, concurrency=4)
    losses = (3.0, 2.0, 2.5, 4.0)
    for trial, loss in zip(await started(here, sweep["id"], 4), losses, strict=True):
        await train(here, trial["jobId"], {50: loss + 1, 100: loss}, Phase.SUCCEEDED if loss < 2.7 else None)

    async def measured() -> Any:
        here.services[SweepWork].wake.set()
        seen = await here.get(f"/sweeps/{sweep['id']}")
        by_number = {each["number"]: (each["value"], each["phase"] == "Succeeded") for each in seen["table"]}
        expected = {number: (loss, loss < 2.7) for number, loss in enumerate(losses, 1)}
        return seen if seen["bestValue"] == 2.0 and by_number == expected else None

    done: dict[str, Any] = await until(measured, "the trials' values and ends")
    return done


async def test_a_sweep_shows_its_best_trial_and_stops_another(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", make=create_app) as here:
        browser = Browser(here.client)
        assert "No sweep yet" in (await browser.get("/sweeps")).text
        sweep = await swept(here)
        listing = (await browser.get("/sweeps")).text
        assert f'<a href="/sweeps/{sweep["id"]}">lr</a>' in listing
        assert "4 of 4" in listing
        reply = await browser.get("/sweeps/lr")  # by its name
        page = html.unescape(reply.text)
        assert re.findall(r'<th scope="row"><a href="/jobs/[^"]+">(lr-\d)</a>', page) == [
            "lr-2",
            "lr-3",
            "lr-1",
            "lr-4",
        ]
        assert re.search(r'class="trial tone-1 trial-best"><title>Trial 2: lr 0.002, loss 2</title>', page)
        assert "over 4 trials" in page
        assert re.search(r"lr<br><span[^>]*>lower values did better", page)
        token = await browser.form_token(f"/sweeps/{sweep['id']}")
        assert re.findall(r'name="trial" value="(\d)"', page) == ["1", "4"], "what has ended can't be stopped"
        reply = await browser.post(f"/sweeps/{sweep['id']}/stop", {"form_token": token, "trial": "4"})
        assert notes(await browser.get(reply.headers["location"])) == [
            "Trial 4 is being cancelled. It keeps its checkpoints, and the sweep goes on."
        ]
        job = next(each["jobId"] for each in sweep["table"] if each["number"] == 4)
        assert (await here.get(f"/jobs/{job}"))["spec"]["cancel"] is True
        assert f'<a href="/sweeps/{sweep["id"]}">sweep</a>, trial 4' in (await browser.get(f"/jobs/{job}")).text
        gone = await browser.post(f"/sweeps/{sweep['id']}/stop", {"form_token": token, "trial": "9"})
        assert "no such trial" in notes(await browser.get(gone.headers["location"]))[0]
        await browser.post(f"/sweeps/{sweep['id']}/cancel", {"form_token": token})
        assert (await here.get(f"/sweeps/{sweep['id']}"))["phase"] in ("Stopping", "Cancelled")
        assert (await browser.get("/sweeps/nowhere")).status_code == 404
