"""An API process that is killed between a webhook's delivery and its record; the receiver speaks TLS."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.integration.api.platform import document
from tests.integration.api.webhook_receiver import receiver
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.local.cluster import LocalCluster
from muster.words.state_folder import StateFolder
from muster.words.status import Phase

pytestmark = pytest.mark.long

_API = """
import os, signal, sys
from muster.api.webhooks import delivering

async def killed(self, claimed, result):
    assert result.error is None, result.error
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv.pop(1) == "dies":
    delivering.DeliverySender._record = killed
from muster.api.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def certificate(folder: Path, name: str) -> Path:
    """A certificate of that name, signed by itself, and its key, in one file."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "receiver.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@contextlib.contextmanager
def api(state: Path, trusted: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    loopback = json.dumps([str(ipaddress.ip_network("127.0.0.0/8")), "::1/128"])
    environment = {**os.environ, "SSL_CERT_FILE": str(trusted), "MUSTER_API_WEBHOOK_NETWORKS": loopback}
    with (state.parent / "api.log").open("a") as log:
        command = [sys.executable, "-c", _API, how, "--state", str(state), "--port", "0", "--no-auth"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    assert process.stdout is not None
    try:
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match, (state.parent / "api.log").read_text()
        yield process, match[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def finish(state: Path, job: str) -> None:
    """Write the status of its end, as the operator would."""
    cluster = LocalCluster(StateFolder(state).cluster)
    found = cluster.get(job)
    ended = {"phase": Phase.SUCCEEDED, "code": "Done", "because": "done", "since": time.time()}
    cluster.write_status(job, found.status.model_copy(update=ended), found.metadata.resource_version)


def end_claims(state: Path) -> None:
    """Let the time be up for which a process that claimed a message is waited for."""
    with contextlib.closing(sqlite3.connect(StateFolder(state).database)) as database, database:
        database.execute("UPDATE webhook_deliveries SET next_at = 0")


def test_killed_between_delivery_and_record_it_is_told_twice_under_one_id(tmp_path: Path) -> None:
    trusted = certificate(tmp_path, "localhost")
    with receiver(trusted) as there:
        with api(tmp_path / "state", trusted, "dies") as (process, url):
            hook = {"name": "hook", "url": f"https://localhost:{there.port}/ok"}
            assert httpx2.post(f"{url}/projects/default/webhooks", json=hook).status_code == 201
            job = httpx2.post(f"{url}/jobs", json=document()).json()["id"]
            eventually(lambda: httpx2.get(f"{url}/jobs/{job}").json()["handedOver"], "the hand-over")
            finish(tmp_path / "state", job)
            assert process.wait(WAIT_SECONDS_MAX) == -signal.SIGKILL
        assert len(there.heard("/ok")) == 1
        end_claims(tmp_path / "state")
        with api(tmp_path / "state", trusted, "lives") as (_, url):
            path = f"{url}/projects/default/webhooks/hook/deliveries"
            (delivery,) = eventually(
                lambda: httpx2.get(path, params={"status": "delivered"}).json()["items"], "the record"
            )
        assert [message["headers"]["webhook-id"] for message in there.heard("/ok")] == [delivery["id"]] * 2
