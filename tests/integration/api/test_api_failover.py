"""PostgreSQL fails over under two API processes, by the address of docs/operations.md: they go on by themselves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx2
import pytest
from tests.integration.api.machines import machine_of
from tests.integration.api.postgres import CannotStart, PostgresServer, postgres_server, standby_of
from tests.integration.api.test_api_replicas import Load, assert_nothing_lost_or_doubled, replicas, under_load
from tests.polling import eventually

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
TIMEOUT = {"MUSTER_API_DATABASE_TIMEOUT_SECONDS": "2"}


def answer_only_what_the_standby_has(primary: PostgresServer, database: str) -> None:
    primary.sql(f"ALTER DATABASE {database} SET synchronous_commit = on")
    primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.sql("SELECT pg_reload_conf()")
    streams = "SELECT sync_state FROM pg_stat_replication"
    eventually(lambda: primary.sql(streams) == "sync", "a synchronous standby")


def promote(standby: PostgresServer) -> None:
    command = [standby.bin / "pg_ctl", "promote", "-D", standby.folder / "data"]
    subprocess.run(command, cwd=standby.folder, check=True, capture_output=True, **standby.identity)


def documented(name: str, *ports: int) -> str:
    """The address that the documentation gives, of servers at these ports."""
    (query,) = re.findall(r"postgresql://\S+?/muster(\?host=\S+)", OPERATIONS.read_text())
    for server, port in zip("ab", ports, strict=True):
        query = query.replace(f"db-{server}:5432", f"127.0.0.1:{port}")
    return f"postgresql://postgres@/{name}{query}"


@pytest.mark.long
@pytest.mark.postgres
def test_replicas_go_on_at_the_standby_when_the_machine_of_the_primary_goes_dark(tmp_path: Path) -> None:
    """Nothing of a machine without power closes a connection, and its address is the first of the two. Later it comes
    back as a standby."""
    with (
        postgres_server() as primary, standby_of(primary) as standby,
        machine_of(primary) as first, machine_of(standby) as second,
    ):  # fmt: skip
        name = primary.new_database()
        answer_only_what_the_standby_has(primary, name)
        url = documented(name, first.port, second.port)
        with replicas(tmp_path / "state", url, 2, **TIMEOUT) as there:
            logs = [tmp_path / f"api-{port}.log" for port in there.ports]
            with under_load(there) as load:
                more(load, 4, "at the primary")
                first.go_dark()
                assert primary.process is not None
                primary.process.kill()
                for number in range(2):
                    assert eventually(lambda: refusal(there.url(number)), "a refusal with its cause")  # noqa: B023
                promote(standby)
                more(load, 4, "at the standby")
                eventually(lambda: all(map(there.answers, range(2))), "ready replicas")
                (primary.folder / "data" / "standby.signal").touch()
                eventually(lambda: started(primary), "the end of what the old primary left running")
                first.come_back()
                more(load, 4, "with the old primary back as a standby")
                eventually(lambda: all(map(listens_again, logs)), "LISTEN on the new primary")
            assert load.dropped > 0, "no request was refused: the test tried nothing"
            assert_nothing_lost_or_doubled(there, load)
        assert "Traceback" not in "".join(log.read_text() for log in logs)


def more(load: Load, jobs: int, where: str) -> None:
    before = len(load.ids)
    eventually(lambda: len(load.ids) >= before + jobs, f"more jobs {where}")


def refusal(url: str) -> str | None:
    """What a replica without a database says, once requests are refused with a time to retry and it is not ready."""
    reply = httpx2.get(f"{url}/jobs")
    ready = httpx2.get(url.replace("/api/v1", "/readyz"))
    if (reply.status_code, ready.status_code) != (503, 503) or "retry-after" not in reply.headers:
        return None
    assert not ready.json()["checks"]["database"]["ok"]
    return str(reply.json()["detail"])


def listens_again(log: Path) -> bool:
    return log.read_text().count("hears of other processes' news") >= 2


def started(server: PostgresServer) -> bool:
    try:
        server.start()
    except CannotStart as error:
        raise AssertionError(f"it does not start: {error}") from error
    return True
