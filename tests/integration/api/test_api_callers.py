"""Who asked a moment ago is not looked up again, and whose rights have changed is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from tests.integration.api.people import settle
from tests.integration.api.platform import Platform, platform

from muster.api.core.callers import ANONYMOUS, Principal
from muster.api.core.database.recent import KEPT_SECONDS, RecentAnswers
from muster.api.core.database.tables import TokenRow
from muster.api.tenants.authentication import CallerAuthentication


def test_an_answer_is_used_for_a_second_and_not_past_a_change() -> None:
    callers = RecentAnswers[Principal](TokenRow)
    callers.keep("a", ANONYMOUS, callers.changes, now=10.0)
    assert callers.get("a", now=10.0 + KEPT_SECONDS / 2) is ANONYMOUS
    assert callers.get("a", now=10.0 + KEPT_SECONDS) is None
    read_before = callers.changes
    callers.forget()
    callers.keep("a", ANONYMOUS, read_before, now=11.0)
    assert callers.get("a", now=11.0) is None, "it was read before the change"


async def test_a_burst_of_requests_asks_the_database_once_who_it_is(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", auth=True) as here:
        headers = {"authorization": f"Bearer {here.state.admin_token.read_text().strip()}"}
        asked: list[str] = []
        engine = here.services.database.engine.sync_engine

        def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "FROM tokens" in statement:
                asked.append(statement)

        event.listen(engine, "before_cursor_execute", note)
        here.services[CallerAuthentication].callers.forget()
        for _ in range(20):
            here.services[CallerAuthentication].callers._entries = type(
                here.services[CallerAuthentication].callers._entries
            )(
                (key, (found[0] + 60, found[1]))
                for key, found in here.services[CallerAuthentication].callers._entries.items()
            )  # however slow this machine is
            assert (await here.client.get("/api/v1/me", headers=headers)).status_code == 200
        assert len(asked) == 1


CHANGES = {
    "a role is taken away": ("DELETE", "/projects/nlp/members/nlp-viewer", None, 404),
    "a role is given": ("PUT", "/projects/nlp/members/nlp-viewer", {"role": "member"}, 200),
    "somebody is disabled": ("PUT", "/people/nlp-viewer", {"disabled": True}, 401),
    "the token is revoked": ("DELETE", "/tokens/{token}", None, 401),
    "the project is deleted": ("DELETE", "/projects/asr", None, 404),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_what_is_taken_away_counts_with_the_next_request(tmp_path: Path, change: str) -> None:
    method, path, body, expected = CHANGES[change]
    async with platform(tmp_path / "state", auth=True) as here:
        people = await settle(here, tmp_path / "state")
        project = "asr" if "project" in change else "nlp"
        await people.ask("admin", "PUT", "/projects/asr", json={})
        await people.give("asr", "nlp-viewer", "viewer")
        token = await people.token("nlp-viewer", None)
        people.headers["nlp-viewer"] = {"authorization": f"Bearer {token['token']}"}
        for_ever(here)
        assert (await people.ask("nlp-viewer", "GET", f"/projects/{project}")).status_code == 200
        changed = await people.ask("admin", method, path.format(token=token["id"]), json=body)
        assert changed.is_success, changed.text
        assert (await people.ask("nlp-viewer", "GET", f"/projects/{project}")).status_code == expected
        if expected == 200:
            assert (await people.ask("nlp-viewer", "GET", "/me")).json()["roles"]["nlp"] == "member"


def for_ever(here: Platform) -> None:
    """What is kept is kept until something changes: a second that has passed must not be what passes the test."""
    callers = here.services[CallerAuthentication].callers
    keep = callers.keep
    callers.keep = lambda hash_, caller, changes, now=None: keep(hash_, caller, changes, 1e12)  # type: ignore[method-assign]
