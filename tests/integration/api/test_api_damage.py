"""A full disk, a damaged file, a file of a newer Muster: each is said with its cause and the next step, untraced."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import event
from tests.forked import ForkedProgram
from tests.integration.api.platform import document, platform
from tests.polling import WAIT_SECONDS_MAX

from muster.local.cluster import LocalCluster, UnusableFile
from muster.words.state_folder import StateFolder

NO_DATABASE = b"not a database, but long enough to be taken for one " * 100
COMMANDS = {
    "api": ["muster.api", "--port", "0"],
    "operator": ["muster.operator", "--world", "local"],
    "up": ["muster.cli", "up", "--port", "0"],
}


def start(state: Path, name: str) -> tuple[int, str]:
    module, *words = COMMANDS[name]
    log = state / "errors"
    process = ForkedProgram(module, [*words, "--state", state], log, {**os.environ, "NO_COLOR": "1"})
    try:
        code = process.wait(WAIT_SECONDS_MAX)
    finally:
        process.kill()
    text = log.read_text()
    assert "Traceback" not in text, text
    return code, text


def newer_cluster(state: StateFolder) -> None:
    LocalCluster(state.cluster)
    with sqlite3.connect(state.cluster) as db:
        db.execute("PRAGMA user_version = 99")


def newer_history(state: StateFolder) -> None:
    with sqlite3.connect(state.database) as db:
        db.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        db.execute("INSERT INTO alembic_version VALUES ('ffff99999999')")


DAMAGE = {
    "cluster.db damaged": (lambda state: state.cluster.write_bytes(NO_DATABASE), "cluster.db is damaged"),
    "cluster.db newer": (newer_cluster, "cluster.db is of a newer Muster"),
    "muster.db damaged": (lambda state: state.database.write_bytes(NO_DATABASE), "muster.db is damaged"),
    "muster.db newer": (newer_history, "the database is of a newer Muster (its revision ffff99999999"),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("api", damage) for damage in DAMAGE),
        *(("operator", damage) for damage in DAMAGE if "muster.db" not in damage),
        *(("up", damage) for damage in ("cluster.db damaged", "muster.db newer")),  # each file, and each fault
    ],
)
def test_damage_is_said_with_the_next_step(tmp_path: Path, name: str, damage: str) -> None:
    state = StateFolder(tmp_path)
    make, words = DAMAGE[damage]
    make(state)
    code, text = start(tmp_path, name)
    assert code in (1, 3, 4), text
    assert words in text
    assert "move it away" in text or "start that version" in text


async def test_a_full_disk_is_said(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as here:
        await here.submit()

        def shrink(connection: object, *_: object) -> None:
            connection.cursor().execute("PRAGMA max_page_count = 1")  # type: ignore[attr-defined]

        engine = here.services.database.engine.sync_engine
        event.listen(engine, "checkout", shrink)
        large = document("large", runtime={"env": [{"name": "A", "value": "x" * 200_000}]})
        reply = await here.client.post("/api/v1/jobs", json=large)
        event.remove(engine, "checkout", shrink)
        assert (reply.status_code, reply.json()["code"]) == (503, "database_unavailable")
        assert "disk of the database is full" in reply.json()["detail"]


async def test_a_database_that_can_not_be_written_is_not_ready(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as here:
        engine = here.services.database.engine.sync_engine

        def refuse(connection: object, *_: object) -> None:
            connection.cursor().execute("PRAGMA query_only = 1")  # type: ignore[attr-defined]

        def allow(connection: object, *_: object) -> None:
            connection.cursor().execute("PRAGMA query_only = 0")  # type: ignore[attr-defined]

        event.listen(engine, "checkout", refuse)
        ready = await here.client.get("/readyz")
        event.remove(engine, "checkout", refuse)
        assert (ready.status_code, ready.json()["checks"]["database"]["ok"]) == (503, False)
        assert (await here.client.get("/healthz")).status_code == 200
        event.listen(engine, "checkout", allow)
        assert (await here.client.get("/readyz")).json()["checks"]["database"]["ok"]


def test_a_file_of_before_versions_were_written_is_taken(tmp_path: Path) -> None:
    LocalCluster(tmp_path / "cluster.db")
    with sqlite3.connect(tmp_path / "cluster.db") as db:
        db.execute("PRAGMA user_version = 0")
    LocalCluster(tmp_path / "cluster.db")
    assert sqlite3.connect(tmp_path / "cluster.db").execute("PRAGMA user_version").fetchone() == (1,)


def test_a_full_disk_keeps_the_cluster_from_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(UnusableFile, match="is full: free some space"):
        LocalCluster(tmp_path / "cluster.db")
