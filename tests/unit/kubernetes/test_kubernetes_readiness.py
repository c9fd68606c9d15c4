"""An operator is ready where the API server answers about its lease, and says so where it does not."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.polling import WAIT_SECONDS_MAX
from tests.unit.kubernetes.api_server import api_server, kubeconfig

from muster.kube.client import ApiClient
from muster.kube.connection import from_kubeconfig
from muster.operator.kubernetes.leader import UNREADY_SECONDS, WARN_SECONDS, LeaderElection, LeaseReadiness
from muster.operator.server import LoopLiveness, serve_pages


def readyz(port: int) -> tuple[int, dict[str, str]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def test_an_operator_that_the_api_server_does_not_answer_is_not_ready(tmp_path: Path) -> None:
    """It was, with a certificate that it refused: two of two ready, and no job got a status."""
    readiness, troubles, leaders = LeaseReadiness(), asyncio.Queue[str](), asyncio.Queue[str]()
    pages = serve_pages(LoopLiveness(), "127.0.0.1", 0, {}, {}, readiness.problem)
    authority = Authority()
    try:
        assert await asyncio.to_thread(readyz, pages.server_port) == (
            503,
            {"status": "not ready", "because": _BECAUSE + "it has not answered yet"},
        )
        with api_server(*authority.issue(tmp_path, "server", "127.0.0.1")) as port:
            for trusted in (Authority(), authority):
                connection = from_kubeconfig(kubeconfig(tmp_path, trusted, port))
                async with ApiClient(connection, "test") as client:
                    leader = LeaderElection(
                        client, "system", "second", leaders.put_nowait, lambda error: troubles.put_nowait(str(error)),
                        readiness,
                    )  # fmt: skip
                    waiting = asyncio.create_task(leader.acquire())
                    if trusted is authority:
                        assert await asyncio.wait_for(leaders.get(), WAIT_SECONDS_MAX) == "first"
                        assert await asyncio.to_thread(readyz, pages.server_port) == (200, {"status": "ok"})
                    else:
                        assert "CERTIFICATE_VERIFY_FAILED" in await asyncio.wait_for(troubles.get(), WAIT_SECONDS_MAX)
                        status, told = await asyncio.to_thread(readyz, pages.server_port)
                        assert (status, told["because"].startswith(_BECAUSE)) == (503, True)
                        assert "CERTIFICATE_VERIFY_FAILED" in told["because"]
                    waiting.cancel()
            assert leaders.empty(), "nobody is told of as a leader where none could be asked for"
    finally:
        pages.shutdown()
        pages.server_close()


_BECAUSE = "the API server does not let us read or renew our lease: "


def test_readiness_ends_some_time_after_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    readiness = LeaseReadiness()
    readiness.answered()
    readiness.failed(OSError("gone"))
    clock[0] += UNREADY_SECONDS - 1
    assert readiness.problem() == ""
    clock[0] += 2
    assert readiness.problem() == _BECAUSE + "gone"
    readiness.answered()
    assert readiness.problem() == ""


async def test_a_trouble_that_lasts_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a new one at once; it was told every second, at the level of things that are as they should be."""
    clock, told = [1000.0], list[tuple[float, str]]()
    errors = iter([*["refused"] * 70, *["no route"] * 2])

    class Silent:
        async def get(self, path: str) -> dict[str, object]:
            raise OSError(next(errors))

    async def pause(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(asyncio, "sleep", pause)
    leader = LeaderElection(
        Silent(),
        "system",
        "first",
        troubled=lambda error: told.append((clock[0] - 1000, str(error))),  # type: ignore[arg-type]
    )
    with pytest.raises((StopIteration, RuntimeError)):
        await leader.acquire()
    assert told == [(0.0, "refused"), (WARN_SECONDS + 1, "refused"), (70.0, "no route")]
