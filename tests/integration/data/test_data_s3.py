"""S3 and the web as sources, against a real server of S3 (moto) and a real one of https."""

import gzip
import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.drills.checkpoint.faulty_proxy import Plan, faulty_proxy
from tests.unit.data.making import CHATML, contents, stored, write_tokenizer

from muster.storage import sources
from muster.storage.errors import ReplacedObject, StoreError, StoreRefusal
from muster.storage.opening import open_source
from muster.trainer.data import load_tokenizer
from muster.trainer.errors import StorageError, UserError
from muster.words.address import parse_address

LINES = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    made = boto3.resource("s3").create_bucket(Bucket="texts")
    yield made
    made.objects.delete()
    made.delete()


def keys(address: str, format: str = "text") -> list[str]:
    return [file.address.removeprefix("s3://texts/") for file in sources.find(address, format)]


def test_objects_folders_and_globs(bucket: Any) -> None:
    for key in ("a/b.jsonl", "a/c.txt", "a/.hidden", "a/sub/d.jsonl.gz", "ab/e.jsonl", "a/", "a?b#c %41.txt"):
        bucket.put_object(Key=key, Body=b"x")
    assert keys("s3://texts/a") == keys("s3://texts/a/") == ["a/b.jsonl", "a/c.txt", "a/sub/d.jsonl.gz"]
    assert keys("s3://texts/a", "jsonl") == ["a/b.jsonl", "a/sub/d.jsonl.gz"]
    assert keys("s3://texts/a/c.txt", "jsonl") == ["a/c.txt"]
    assert keys("s3://texts/a*/?.jsonl") == ["a/b.jsonl", "ab/e.jsonl"]
    assert keys("s3://texts/a?b#c %41.txt") == ["a?b#c %41.txt"]
    assert len(keys("s3://texts")) == 5


def test_a_store_is_made_from_objects_and_found_again(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="a.jsonl", Body=LINES)
    bucket.put_object(Key="b.jsonl.gz", Body=gzip.compress(b'{"text": "three"}\n'))
    store = stored("s3://texts", tmp_path / "cache", format="jsonl")
    assert sorted(contents(store)) == [b"one", b"three", b"two"]
    again = stored("s3://texts/", tmp_path / "cache", format="jsonl")
    assert again.meta == store.meta
    bucket.put_object(Key="a.jsonl", Body=LINES.replace(b"one", b"ONE"))
    assert b"ONE" in contents(stored("s3://texts", tmp_path / "cache", format="jsonl"))


def test_a_corrupt_line_names_the_object(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="bad.jsonl", Body=LINES + b"{")
    with pytest.raises(UserError, match=r"s3://texts/bad\.jsonl, line 3: is not valid JSON"):
        stored("s3://texts/bad.jsonl", tmp_path / "cache", format="jsonl")


def test_a_tokenizer_is_read_from_s3(bucket: Any, tmp_path: Path) -> None:
    bucket.upload_file(str(write_tokenizer(tmp_path / "tokenizer.json", CHATML)), "model/tokenizer.json")
    described = load_tokenizer("s3://texts/model/tokenizer.json").describe()
    assert described == load_tokenizer(str(tmp_path)).describe()
    with pytest.raises(UserError, match=r"s3://texts/none\.json does not exist"):
        load_tokenizer("s3://texts/none.json")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://no-such-bucket/a", "s3://no-such-bucket/a.*: the bucket does not exist"),
        ("s3://texts/none", "s3://texts/none: no files for format text there"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_what_is_not_there_is_refused(address: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sources.find(address, "text")


@pytest.mark.usefixtures("bucket")
def test_missing_credentials_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="no AWS credentials were found"):
        sources.find("s3://texts/a", "text")


def test_a_store_that_does_not_answer_may_answer_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("MUSTER_S3_RETRY_SECONDS", "0.2")
    with pytest.raises(StorageError, match="s3://texts/a: can't look at it: the store can't be reached"):
        sources.find("s3://texts/a", "text")


def test_a_read_goes_on_after_dropped_connections(bucket: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 4_000
    bucket.put_object(Key="a.bin", Body=data)
    plan = Plan()
    with faulty_proxy(server, plan) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        plan.rates = {"truncated": 0.5}
        (found,) = sources.find("s3://texts/a.bin", "text")
        with found.open() as stream:
            assert stream.read() == data
        plan.rates = {}
    assert plan.done["truncated"] > 0


def test_an_object_that_is_replaced_while_it_is_read_is_refused(bucket: Any) -> None:
    bucket.put_object(Key="a.bin", Body=b"before")
    (found,) = sources.find("s3://texts/a.bin", "text")
    bucket.put_object(Key="a.bin", Body=b"behind")
    with pytest.raises(ReplacedObject, match=r"s3://texts/a\.bin: was replaced while it was being read"):
        found.open().read()


FILES = {"/data/a%20b.jsonl?x=1": LINES, "/long.txt": bytes(range(256)) * 20_000}


class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cut_at = 1 << 20  # of each answer

    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = FILES.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("ETag", f'"{len(body)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[start : start + self.cut_at])
            self.close_connection = len(body) - start > self.cut_at

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    served = http.server.ThreadingHTTPServer(("localhost", 0), Web)
    served.socket = context.wrap_socket(served.socket, server_side=True)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    yield f"https://localhost:{served.server_port}"
    served.shutdown()
    served.server_close()


def test_a_file_of_the_web_is_a_source(web: str, tmp_path: Path) -> None:
    store = stored(f"{web}/data/a%20b.jsonl?x=1", tmp_path / "cache", format="jsonl")
    assert sorted(contents(store)) == [b"one", b"two"]
    with pytest.raises(UserError, match="none: there is no such file"):
        sources.find(f"{web}/none", "text")


def test_the_web_leads_to_no_metadata_service(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a redirect, which is not followed, nor by a name that stands for its address."""
    store = open_source(parse_address(web))
    with pytest.raises(
        StoreRefusal, match=r"/away: leads to http://169\.254\.169\.254/latest/meta-data, which is not encr"
    ):
        store.about("away")

    class Peer(ssl.SSLSocket):
        def getpeername(self) -> tuple[str, int]:
            return "169.254.169.254", 443

    monkeypatch.setattr(ssl.SSLContext, "sslsocket_class", Peer)
    with pytest.raises(StoreRefusal, match=r"is 169\.254\.169\.254, a machine's own metadata service"):
        open_source(parse_address(web)).about("long.txt")


def test_a_file_of_the_web_is_read_on_after_a_broken_answer_and_by_ranges(web: str) -> None:
    store, data = open_source(parse_address(web)), FILES["/long.txt"]
    entry = store.about("long.txt")
    assert entry.bytes == len(data) > 4 * Web.cut_at
    assert store.open(entry).read() == data
    into = memoryview(bytearray(1_000))
    store.read_into("long.txt", 77_777, into)
    assert into == data[77_777:78_777]
    with pytest.raises(StoreError, match="was replaced"):
        store.read_into("long.txt", 0, into, tag="other")
