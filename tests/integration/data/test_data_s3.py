"""S3 as a source, against a real HTTP server that speaks S3 (moto)."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.unit.data.making import CHATML, contents, stored, write_tokenizer

from muster.trainer.data import load_tokenizer, s3, sources
from muster.trainer.errors import StorageError, UserError

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
    client = s3._client  # a test may put another in its place
    client.cache_clear()
    made = boto3.resource("s3").create_bucket(Bucket="texts")
    yield made
    made.objects.delete()
    made.delete()
    client.cache_clear()


def keys(address: str, format: str = "text") -> list[str]:
    return [file.address.removeprefix("s3://texts/") for file in sources.find(address, format)]


def test_objects_folders_and_globs(bucket: Any) -> None:
    for key in ("a/b.jsonl", "a/c.txt", "a/.hidden", "a/sub/d.jsonl.gz", "ab/e.jsonl", "a/"):
        bucket.put_object(Key=key, Body=b"x")
    assert keys("s3://texts/a") == keys("s3://texts/a/") == ["a/b.jsonl", "a/c.txt", "a/sub/d.jsonl.gz"]
    assert keys("s3://texts/a", "jsonl") == ["a/b.jsonl", "a/sub/d.jsonl.gz"]
    assert keys("s3://texts/a/c.txt", "jsonl") == ["a/c.txt"]
    assert keys("s3://texts/a*/?.jsonl") == ["a/b.jsonl", "ab/e.jsonl"]
    assert len(keys("s3://texts")) == 4


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
        ("s3://no-such-bucket/a", r"s3://no-such-bucket/a: does not exist \(NoSuchBucket\); check bucket and key"),
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
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    s3._client.cache_clear()
    with pytest.raises(UserError, match=r"Unable to locate credentials; set AWS_ACCESS_KEY_ID"):
        sources.find("s3://texts/a", "text")


def test_a_store_that_does_not_answer_may_answer_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3._client.cache_clear()
    with pytest.raises(StorageError, match=r"s3://texts/a: can't be read: Could not connect"):
        sources.find("s3://texts/a", "text")
    s3._client.cache_clear()


class Dropping:
    """The real client, but each connection breaks after `after` bytes: by an error, or by ending too soon."""

    def __init__(self, real: Any, after: int, error: Exception | None) -> None:
        self.real, self.after, self.error, self.connections = real, after, error, 0

    def get_object(self, **wanted: Any) -> dict[str, Any]:
        self.connections += 1
        body = self.real.get_object(**wanted)["Body"].read()[: self.after]
        return {"Body": self._Body(body, self.error)}

    class _Body:
        def __init__(self, data: bytes, error: Exception | None) -> None:
            self.data, self.error = data, error

        def read(self, count: int) -> bytes:
            if not self.data and self.error:
                raise self.error
            given, self.data = self.data[:count], self.data[count:]
            return given


@pytest.mark.parametrize("error", [None, ConnectionResetError("reset by peer")])
def test_a_read_goes_on_after_dropped_connections(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    data = bytes(range(256)) * 40
    bucket.put_object(Key="a.bin", Body=data)
    (found,) = s3.find("s3://texts/a.bin")
    dropping = Dropping(s3._client(), 1000, error)
    monkeypatch.setattr(s3, "_client", lambda: dropping)
    assert found.open().read() == data
    assert dropping.connections == 11


def test_a_read_that_never_advances_gives_up(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put_object(Key="a.bin", Body=b"x" * 10)
    (found,) = s3.find("s3://texts/a.bin")
    dropping = Dropping(s3._client(), 0, None)
    monkeypatch.setattr(s3, "_client", lambda: dropping)
    with pytest.raises(StorageError, match=r"a\.bin: can't be read: the connection ended after 0 of 10 bytes"):
        found.open().read()
    assert dropping.connections == s3.RECONNECTS + 1


def test_an_object_that_is_replaced_while_it_is_read_is_refused(bucket: Any) -> None:
    bucket.put_object(Key="a.bin", Body=b"before")
    (found,) = s3.find("s3://texts/a.bin")
    bucket.put_object(Key="a.bin", Body=b"behind")
    with pytest.raises(UserError, match=r"s3://texts/a\.bin: was replaced while it was being read"):
        found.open().read()
