"""Every store keeps the same promises: a folder, both kinds of S3 server, and one that checks CRC-32 as AWS does."""

import errno
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError
from tests.drills.checkpoint.faulty_proxy import Plan, faulty_proxy
from tests.s3_servers import Missing, S3Server, rclone_server

from muster.storage.checksum import PART_BYTES, combine, crc32, parts_of
from muster.storage.errors import NotFound, StoreError, StoreRefusal, TruncatedObject
from muster.storage.file_store import FileStore
from muster.storage.opening import open_store
from muster.storage.retry import StoreRetry
from muster.storage.s3_bucket import S3Bucket
from muster.storage.s3_probe import StoreServer, md5, probe
from muster.storage.s3_store import S3Store
from muster.storage.s3_upload import upload_part_bytes
from muster.storage.settings import S3Settings
from muster.storage.store import Store
from muster.words.address import parse_address
from muster.words.base import UserError

SERVERS = {
    "rclone": StoreServer(conditional=False, integrity="etag"),
    "moto": StoreServer(conditional=True, integrity="etag"),
    "silent": StoreServer(conditional=True, integrity="read_back"),
    "like-aws": StoreServer(conditional=True, integrity="crc32"),
}
PLANS = {"silent": Plan(hides_md5=True), "like-aws": Plan(checks_crc32=True)}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "muster")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "muster-secret")


def s3_store(url: str, retry: StoreRetry | None = None) -> S3Store:
    settings = S3Settings(endpoint=url, addressing="path", streams=4)
    return S3Store(parse_address(f"s3://checkpoints/{uuid.uuid4().hex}"), settings, retry or StoreRetry(5))


@pytest.fixture(params=["folder", "rclone", "moto", "silent", "like-aws"])
def store(request: pytest.FixtureRequest, tmp_path: Path, keys: None) -> Iterator[Store]:
    if request.param == "folder":
        yield FileStore(tmp_path / "uid")
        return
    server: S3Server = request.getfixturevalue("rclone_s3" if request.param == "rclone" else "moto_s3")
    with faulty_proxy(server.url, PLANS.get(request.param, Plan())) as url:
        made = s3_store(url)
        assert made.server == SERVERS[request.param]
        yield made


@pytest.mark.parametrize("size", [0, 1, 100_000, 2 * PART_BYTES + 12_345])
def test_a_large_object_comes_back_whole_and_in_ranges(store: Store, size: int) -> None:
    data = memoryview(os.urandom(size))
    entry = store.write("step-00000001/attempt-1/x", data)
    store.verify(entry)
    assert (entry.bytes, entry.checksum) == (size, crc32(data))
    assert entry.checksum == combine([(c, n) for c, (_, n) in zip(entry.parts, parts_of(size), strict=True)])
    for start, length in ((0, size), (size // 3, size // 2), (max(size - 1, 0), min(size, 1))):
        into = memoryview(bytearray(length))
        store.read_into(entry.key, start, into)
        assert into == data[start : start + length]


def test_files_that_only_another_rank_sees_are_found_out(store: Store) -> None:
    entry = store.write("step-00000001/attempt-1/x", memoryview(b"123"))
    store.see_all([entry], "step-00000001/attempt-1/")
    other = entry.model_copy(update={"key": "step-00000001/attempt-1/y"})
    if isinstance(store, S3Store) and store.server.integrity == "etag":
        pytest.skip(reason="servers of this kind hash all objects to list them, and all ranks use the same address")
    with pytest.raises(StoreError, match="y: is not there, although its rank has written it; all ranks must see"):
        store.see_all([other], "step-00000001/attempt-1/")


def test_creation_is_exclusive(store: Store) -> None:
    assert store.create("commits/a", b"first")
    assert not store.create("commits/a", b"second")
    assert store.read("commits/a") == b"first"
    store.replace("commits/a", b"third")
    assert store.read("commits/a") == b"third"


def test_of_many_creators_one_wins(store: Store) -> None:
    if isinstance(store, S3Store) and not store.server.conditional:
        pytest.skip(reason="this server ignores If-None-Match: the attempt's fence alone must hold")
    start = threading.Barrier(8)

    def race(number: int) -> bool:
        start.wait()
        return store.create("commits/race", str(number).encode())

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(race, range(8)))
    assert won.count(True) == 1
    assert store.read("commits/race") == str(won.index(True)).encode()


def test_listing_and_deleting(store: Store) -> None:
    for key in ("commits/a", "commits/b", "step-1/x", "step-10/y"):
        store.create(key, b"12")
    assert [(o.key, o.bytes) for o in store.objects("commits/")] == [("commits/a", 2), ("commits/b", 2)]
    assert [o.key for o in store.objects("step-1")] == ["step-1/x", "step-10/y"]
    store.delete("commits/a")
    store.delete("commits/a")
    assert [o.key for o in store.objects("")] == ["commits/b", "step-1/x", "step-10/y"]
    assert not list(store.objects("nothing/"))


def test_what_is_missing_or_too_short_is_told_apart(store: Store) -> None:
    store.write("step-00000001/attempt-1/x", memoryview(b"0123456789"))
    with pytest.raises(NotFound, match="there is no such"):
        store.read("nothing")
    with pytest.raises(NotFound, match="there is no such"):
        store.read_into("nothing", 0, memoryview(bytearray(1)))
    for start in (5, 20):
        with pytest.raises(TruncatedObject, match=r"x: .*truncated"):
            store.read_into("step-00000001/attempt-1/x", start, memoryview(bytearray(8)))


def test_a_listing_of_many_pages(keys: None, moto_s3: S3Server) -> None:
    store = s3_store(moto_s3.url)
    pages: list[str | None] = []

    def small(params: dict[str, Any], **_: Any) -> None:
        pages.append(params.get("ContinuationToken"))
        params["MaxKeys"] = 10

    store._bucket.client.meta.events.register("before-parameter-build.s3.ListObjectsV2", small)
    named = [f"step-{n:08d}/x" for n in range(25)]
    for key in named:
        store.create(key, b"")
    assert [o.key for o in store.objects("step-")] == named
    assert len(set(pages)) == 3


def test_ten_thousand_files_in_the_prefix_are_no_hindrance(keys: None, tmp_path: Path) -> None:
    try:
        with rclone_server(tmp_path) as server:
            store = s3_store(server.url)
            folder = tmp_path / "checkpoints" / store.uri.rpartition("/")[2]
            for step in range(1, 101):
                (folder / f"step-{step:08d}" / "attempt-1").mkdir(parents=True)
                for shard in range(100):
                    (folder / f"step-{step:08d}" / "attempt-1" / f"shard-{shard:05d}-of-00100.safetensors").touch()
            assert sum(1 for _ in store.objects("step-")) == 10_000
            assert store.create("commits/step-00000101.json", b"{}")
            assert [found.key for found in store.objects("commits/")] == ["commits/step-00000101.json"]
    except Missing as missing:
        pytest.skip(reason=str(missing))


@pytest.mark.parametrize("kind", ["rclone", "moto"])
def test_interrupted_uploads_are_given_up(request: pytest.FixtureRequest, keys: None, kind: str) -> None:
    server: S3Server = request.getfixturevalue(f"{kind}_s3")
    store, client = s3_store(server.url), server.client()
    folder = store.uri.removeprefix("s3://checkpoints/")
    for attempt in (1, 2):
        client.create_multipart_upload(Bucket="checkpoints", Key=f"{folder}/step-00000001/attempt-{attempt}/x")
    store.drop_unfinished(lambda key: key == "step-00000001/attempt-1/x")
    left = client.list_multipart_uploads(Bucket="checkpoints", Prefix=f"{folder}/").get("Uploads", [])
    assert [upload["Key"] for upload in left] == [f"{folder}/step-00000001/attempt-2/x"]


@pytest.mark.parametrize("fault", ["slow_down", "error", "reset_before", "reset_after", "truncated", "late"])
def test_each_fault_of_the_network_is_survived(keys: None, rclone_s3: S3Server, fault: str) -> None:
    data = memoryview(os.urandom(2 * PART_BYTES + 5))
    plan = Plan(seed=7)
    with faulty_proxy(rclone_s3.url, plan) as url:
        store = s3_store(url, StoreRetry(30))
        store.warm_up()
        plan.rates = {fault: 0.4}
        entry = store.write("step-00000001/attempt-1/x", data)
        store.verify(entry)
        store.create("commits/a", b"1" * 100)
        into = memoryview(bytearray(len(data)))
        store.read_into(entry.key, 0, into)
        assert store.read("commits/a") == b"1" * 100
        plan.rates = {}
    assert into == data
    assert plan.done[fault] > 0


@pytest.mark.long
def test_a_store_that_is_slow_but_goes_on_is_not_given_up(
    keys: None, rclone_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that takes longer than the time within which something must move."""
    monkeypatch.setattr("muster.storage.settings.READ_SECONDS_MAX", 5.5)
    plan = Plan()
    with faulty_proxy(rclone_s3.url, plan) as url:
        store = s3_store(url, StoreRetry(0.1))
        store.warm_up()
        # 8 s for the body, of which sockets hold some 6 MiB: those and the answer take far less than 5.5 s.
        plan.reads_in = (1 << 20, 0.2)
        store.replace("step-00000001/attempt-1/x", bytes(40 << 20))
        plan.reads_in = None
    assert plan.done["requests"] <= 6  # the probe, and the one that was slow


@pytest.mark.parametrize("integrity", ["etag", "crc32"])
def test_a_bit_flipped_on_the_way_up_is_refused_and_sent_again(
    request: pytest.FixtureRequest, keys: None, integrity: str
) -> None:
    server: S3Server = request.getfixturevalue("rclone_s3" if integrity == "etag" else "moto_s3")
    data, plan = memoryview(os.urandom(3 * PART_BYTES)), Plan(seed=4, checks_crc32=integrity == "crc32")
    with faulty_proxy(server.url, plan) as url:
        store = s3_store(url, StoreRetry(30))
        assert store.server.integrity == integrity
        plan.rates = {"flipped_request": 0.2}
        store.write("step-00000001/attempt-1/x", data)
        plan.rates = {}
        into = memoryview(bytearray(len(data)))
        store.read_into("step-00000001/attempt-1/x", 0, into)
    assert plan.done["flipped_request"] > 0
    assert into == data


def test_where_the_server_checks_nothing_a_flip_is_found_by_reading_back(keys: None, moto_s3: S3Server) -> None:
    plan = Plan(seed=1, hides_md5=True)
    with faulty_proxy(moto_s3.url, plan) as url:
        store = s3_store(url)
        assert store.server.integrity == "read_back"
        plan.rates = {"flipped_request": 1.0}
        entry = store.write("step-00000001/attempt-1/x", memoryview(os.urandom(1_000)))
        plan.rates = {}
        with pytest.raises(StoreError, match="read back differently"):
            store.verify(entry)


def test_a_small_object_that_arrived_damaged_is_written_again(keys: None, moto_s3: S3Server) -> None:
    """A COMMIT too: shards are verified one by one, and nobody verifies what names them but who writes it."""
    plan = Plan(seed=1, hides_md5=True)
    with faulty_proxy(moto_s3.url, plan) as url:
        store = s3_store(url)
        assert store.server.integrity == "read_back"
        written = {f"commits/{number}": os.urandom(500) for number in range(20)}
        plan.rates = {"flipped_request": 0.3}
        for key, data in written.items():
            assert store.create(key, data)
            written[key] = data[::-1]
            store.replace(key, data[::-1])
        plan.rates = {}
        assert {key: store.read(key) for key in written} == written
        plan.rates = {"flipped_request": 1.0}
        with pytest.raises(StoreError, match="commits/0: written 5 times, and read back differently"):
            store.replace("commits/0", b"a COMMIT")
    assert plan.done["flipped_request"] > 5


@pytest.mark.parametrize("fault", ["flipped_request", "reset_after", "error"])
def test_a_fault_while_the_server_is_asked_what_it_does_changes_no_answer(
    keys: None, rclone_s3: S3Server, fault: str
) -> None:
    plan = Plan(seed=1, first_time=fault)
    with faulty_proxy(rclone_s3.url, plan) as url:
        assert s3_store(url).server == SERVERS["rclone"]
    assert plan.done[fault] > 0


@pytest.mark.parametrize("number", range(5))
def test_any_request_of_the_probe_may_be_reset(number: int) -> None:
    """botocore's errors of connections have a `response` that is None."""

    class Client:
        asked = -1

        def put_object(self, Body: bytes, **_: Any) -> dict[str, str]:
            self.asked += 1
            if self.asked == number:
                raise ConnectionClosedError(endpoint_url="http://s3")
            return {"ETag": md5(Body)}

        def delete_object(self, **_: Any) -> None:
            pass

    client, bucket = (
        Client(),
        S3Bucket(parse_address("s3://bucket/x"), S3Settings(), StoreRetry(5, sleep=lambda _: None)),
    )
    found = probe(client, "bucket", "x/", {}, lambda request: bucket.call("", "write", request))
    assert found == StoreServer(conditional=False, integrity="etag")
    assert client.asked >= 2


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        ((403, "AccessDenied"), "access denied; the worker's role needs s3:ListBucket"),
        ((404, "NoSuchBucket"), "the bucket does not exist; create it"),
        ((400, "AuthorizationHeaderMalformed"), "the bucket is in another region; set MUSTER_S3_REGION"),
        ((400, "ExpiredToken"), "the credentials have expired"),
        ((403, "RequestTimeTooSkewed"), "this machine's clock is wrong"),
        ((507, "XMinioStorageFull"), "the store is full; free space"),
        ((503, "SlowDown"), "the store asks to slow down"),
    ],
)
def test_a_refusal_says_cause_place_and_next_step(
    keys: None, moto_s3: S3Server, refusal: tuple[int, str], says: str
) -> None:
    """Refused is what no attempt on any node will be let do: the job's user is told, instead of trying five times."""
    with faulty_proxy(moto_s3.url, Plan(refuse_with=refusal)) as url:
        store = s3_store(url, StoreRetry(0.3))
        with pytest.raises(StoreError, match=says) as caught:
            store.read("commits/a")
        assert str(caught.value).startswith(f"{store.uri}/commits/a: can't read it: ")
        for_good = refusal[1] in ("AccessDenied", "NoSuchBucket", "AuthorizationHeaderMalformed")
        assert isinstance(caught.value, StoreRefusal) == for_good


def test_a_store_that_is_gone_is_given_up_in_time(keys: None) -> None:
    with pytest.raises(StoreError, match="the store can't be reached"):
        s3_store("http://127.0.0.1:9", StoreRetry(0.3)).read("commits/a")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "the disk is full; free space"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "the disk reports an error"),
    ],
)
def test_a_failing_disk_leaves_nothing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    store = FileStore(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(StoreError, match=says):
        store.write("step-00000001/attempt-1/x", memoryview(b"123"))
    with pytest.raises(StoreError, match=says):
        store.create("commits/a", b"1")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="a part of the path is a file"):
        FileStore(tmp_path / "file" / "uid").create("commits/a", b"1")


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", ""])
def test_no_key_leads_out_of_the_folder(tmp_path: Path, key: str) -> None:
    with pytest.raises(StoreError, match="is no key inside the checkpoint folder"):
        FileStore(tmp_path).read(key)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("gs://bucket/x", "nothing reads gs://"),
        ("s3:///x", "names no bucket"),
        ("file://server/x", "has three slashes"),
        ("https://host/x", "is no folder"),
    ],
)
def test_an_address_that_can_not_be_is_refused(uri: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_store(uri)


@pytest.mark.parametrize(
    ("size", "part_mib"), [(1, 16), (16 << 30, 32), (200 << 30, 64), (620 << 30, 64), (5 << 40, 528)]
)
def test_parts_fit_the_file_and_the_limit_of_s3(size: int, part_mib: int) -> None:
    assert upload_part_bytes(size) == part_mib << 20
    assert -(-size // upload_part_bytes(size)) <= 10_000
