"""A disk that really is full: refused with words, no traceback, well again by itself. A small tmpfs takes its place."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.integration.cli.house import MUSTER, House
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.small_disk import Missing, SmallDisk, child_of, fill, free


class SmallHouse(House):
    """Its state folder is a small disk, which only the platform sees; commands come from outside, by its address."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.state.root.mkdir()
        self.disk = SmallDisk(self.state.root, 24 << 20)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.disk.command(["sh", "-c", self.before + 'exec "$@"', "sh", *MUSTER, *words]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ,
            start_new_session=True,
        )

    before = ""

    def seen(self) -> Path:
        """The state folder as the platform has it."""
        assert self.process is not None
        return self.disk.seen_by(self.process)

    def ready(self) -> Any:
        reply = httpx2.get(f"{self.url}/readyz", timeout=WAIT_SECONDS_MAX)
        return reply.status_code, reply.json()["checks"]["database"]["detail"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallHouse]:
    house = SmallHouse(tmp_path)
    yield house
    house.close()


@pytest.mark.long
def test_a_disk_that_gets_full_is_said_and_passes(small: SmallHouse) -> None:
    try:
        small.up()
    except Missing as missing:
        pytest.skip(reason=str(missing))
    here, token = small.seen(), small.seen() / "admin-token"
    small.environ |= {"MUSTER_SERVER": small.url}
    small.environ |= {"MUSTER_TOKEN": token.read_text().strip()} if token.exists() else {}
    file = str(small.job_file("first"))
    small.muster("submit", file, "--set", "suspend=true")
    assert small.ready() == (200, "")

    fill(here)
    assert small.ready() == (503, FULL)
    refused = small.muster("submit", file, "--name", "second", expect=3)
    assert "the disk of the database is full" in refused.stderr.lower()
    assert "Traceback" not in refused.stderr
    listed = small.ask("ls")["items"]
    assert [job["name"] for job in listed] == ["first"], "what is there can be read"
    assert httpx2.get(f"{small.url}/healthz", timeout=WAIT_SECONDS_MAX).status_code == 200

    free(here)
    eventually(lambda: small.ready()[0] == 200, "it to be ready again")
    small.muster("submit", file, "--name", "third", "--set", "suspend=true")
    eventually(lambda: small.phase("third") == "Suspended", "the operator to go on")
    fill(here)
    logs = "".join(log.read_text() for log in (here / "logs").glob("*.log"))
    assert small.process is not None
    child_of(small.process).terminate()
    _, errors = small.process.communicate(timeout=WAIT_SECONDS_MAX)
    code = small.process.returncode
    assert (code, "Traceback" in errors + logs) == (0, False), errors + logs


def test_a_platform_on_a_full_disk_does_not_start_and_says_why(small: SmallHouse) -> None:
    small.before = f"cat /dev/zero > '{small.state.root}/fill' 2>/dev/null; "
    try:
        process = small.start("up", "--port", "0", "--json")
    except Missing as missing:
        pytest.skip(reason=str(missing))
    output, errors = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode != 0, output
    assert "Traceback" not in errors + output
    assert "free some space" in errors.lower() + json.dumps(output).lower()


FULL = "The disk of the database is full, so nothing was changed. Free some space on it; nothing else is needed."
