"""How a bucket is reached: keys, roles, renewed credentials, encryption, addresses; and what is said where it isn't."""

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.s3_servers import BUCKET, KEYS, S3Server

from muster.storage.checksum import PART_BYTES
from muster.storage.errors import StoreError
from muster.storage.retry import StoreRetry
from muster.storage.s3_store import S3Store
from muster.storage.settings import S3Settings, s3_client
from muster.words.address import parse_address

KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
ROLE = "arn:aws:iam::123456789012:role/trainer"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing but a region: whatever gives access is the test's."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "MUSTER_S3")):
            monkeypatch.delenv(name)
    for name, value in {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nothing")
    return monkeypatch


@pytest.fixture
def keys(environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in KEYS.items():
        environment.setenv(name, value)
    return environment


def store_at(url: str, bucket: str = BUCKET, **settings: Any) -> S3Store:
    made = S3Settings(endpoint=url, addressing="path", streams=2, **settings)
    return S3Store(parse_address(f"s3://{bucket}/{uuid.uuid4().hex}"), made, StoreRetry(0.5))


def requests_of(store: S3Store) -> list[tuple[str, dict[str, str]]]:
    """(method, headers) of what the store sends from now on."""
    sent: list[tuple[str, dict[str, str]]] = []

    def note(request: Any, **_: Any) -> None:
        text = {k: v.decode() if isinstance(v, bytes) else str(v) for k, v in request.headers.items()}
        sent.append((request.method, text))

    store._bucket.client.meta.events.register("before-send.s3", note)
    return sent


def test_every_object_is_encrypted_with_the_key_that_was_set(keys: pytest.MonkeyPatch, moto_s3: S3Server) -> None:
    store = store_at(moto_s3.url, kms_key_id=KEY)
    sent = requests_of(store)
    large = store.write("step-00000001/attempt-1/x", memoryview(os.urandom(PART_BYTES + 5)))
    store.write("step-00000001/attempt-1/y", memoryview(b"small"))
    store.verify(large)
    assert store.create("commits/a", b"1")
    folder = store.uri.removeprefix(f"s3://{BUCKET}/")
    for key in (large.key, "step-00000001/attempt-1/y", "commits/a"):
        about = moto_s3.client().head_object(Bucket=BUCKET, Key=f"{folder}/{key}")
        assert (about["ServerSideEncryption"], about["SSEKMSKeyId"]) == ("aws:kms", KEY)
    # The probe as well: a bucket may refuse whatever is not encrypted so. Parts have it of their upload.
    whole = [headers for method, headers in sent if method == "PUT" and headers["Content-Length"] != str(PART_BYTES)]
    assert sum(headers.get("x-amz-server-side-encryption-aws-kms-key-id") == KEY for headers in whole) >= 5


def test_a_role_is_assumed(keys: pytest.MonkeyPatch, moto_s3: S3Server) -> None:
    keys.setenv("AWS_ENDPOINT_URL_STS", moto_s3.url)
    store = store_at(moto_s3.url, role_arn=ROLE)
    sent = requests_of(store)
    assert store.create("commits/a", b"1")
    assert {_access_key(headers)[:4] for _, headers in sent} == {"ASIA"}  # of a role, not the worker's own


def test_credentials_are_renewed_in_the_middle_of_a_run(
    environment: pytest.MonkeyPatch, moto_s3: S3Server, credentials: "Credentials"
) -> None:
    environment.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", credentials.url)  # as on EKS
    store = store_at(moto_s3.url)
    sent = requests_of(store)
    for number in range(3):
        assert store.create(f"commits/{number}", b"1")
    used = [_access_key(headers) for _, headers in sent]
    assert len(set(used)) > 2
    assert used == sorted(used, key=lambda name: int(name[3:]))  # never one that was replaced
    credentials.gone = True
    with pytest.raises(StoreError, match=r"commits/4: can't write it: the credentials"):
        store.create("commits/4", b"1")


class Credentials:
    """The endpoint that a pod asks: each answer is another key, about to expire."""

    def __init__(self) -> None:
        self.number, self.gone = 0, False
        said = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if said.gone:
                    return self.send_error(500)
                said.number += 1
                expires = datetime.now(UTC) + timedelta(seconds=1)
                answer = {
                    "AccessKeyId": f"KEY{said.number}", "SecretAccessKey": "secret", "Token": "token",
                    "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }  # fmt: skip
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/role"


@pytest.fixture
def credentials() -> Iterator[Credentials]:
    made = Credentials()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_without_credentials_it_says_so(environment: pytest.MonkeyPatch, moto_s3: S3Server) -> None:
    with pytest.raises(StoreError, match="no AWS credentials were found; give the worker a role"):
        store_at(moto_s3.url).read("commits/a")


def test_a_role_that_can_not_be_assumed(keys: pytest.MonkeyPatch, moto_s3: S3Server) -> None:
    keys.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(StoreError, match="can't read it: the store can't be reached"):
        store_at(moto_s3.url, role_arn=ROLE).read("commits/a")
    assert time.monotonic() - began < 500


@pytest.mark.parametrize("server", ["moto_s3", "rclone_s3"])
def test_a_bucket_that_is_not_there(keys: pytest.MonkeyPatch, request: pytest.FixtureRequest, server: str) -> None:
    store = store_at(request.getfixturevalue(server).url, bucket="nobodys-bucket")
    for ask in (lambda: store.create("commits/a", b"1"), lambda: list(store.objects("commits/"))):
        with pytest.raises(StoreError, match=r"nobodys-bucket/.*: the bucket does not exist; create it or correct"):
            ask()


@pytest.mark.parametrize(
    ("addressing", "endpoint", "host", "path"),
    [
        ("path", "http://store.local:9000", "store.local:9000", "/bucket/a"),
        ("virtual", "http://store.local:9000", "bucket.store.local:9000", "/a"),
        ("auto", None, "bucket.s3.amazonaws.com", "/a"),
        ("path", None, "s3.amazonaws.com", "/bucket/a"),
    ],
)
def test_addresses(keys: pytest.MonkeyPatch, addressing: str, endpoint: str | None, host: str, path: str) -> None:
    client = s3_client(S3Settings(endpoint=endpoint, addressing=addressing))
    url = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "a"}))
    assert (url.netloc, url.path) == (host, path)


def _access_key(headers: dict[str, str]) -> str:
    return headers["Authorization"].split("Credential=")[1].split("/")[0]
