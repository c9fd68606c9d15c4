"""The same text is the same place for everybody, and a job's folder always ends with its uid."""

import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster.words.address import (
    AddressError,
    HubPath,
    StorageAddress,
    checkpoint_address,
    hub_path,
    is_metadata_host,
    job_folder,
    parse_address,
    refuse_metadata_url,
)

UID = "8f1c9f0e-1111-4222-8333-abcdefabcdef"
ODD = st.sampled_from(" %#?+&=;:@~*[]{}|\\'\"äß日🙂\u0301") | st.characters(blacklist_categories=["Cs", "Cc"])
PARTS = st.sampled_from(["%20", "%2F", "%25", "100%", "a#b", "?x=1", "..", ".", "..."]) | st.text(ODD, max_size=8)
PATHS = st.lists(PARTS, max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(PATHS)
@example("/tmp/my dir")
@example("/tmp/ck#a")
@example("/tmp/ck?x=1")
@example("/tmp/100%/%41")
@example("//server/share")
def test_a_path_is_spelt_as_an_address_and_back(path: str) -> None:
    plain = parse_address(path)
    assert parse_address("file://" + quote(path)) == plain
    assert parse_address(str(plain)) == plain
    assert plain.local == Path("/" + path.lstrip("/"))
    assert parse_address(plain.local.as_uri()) == plain


@given(PATHS.map(lambda path: "file://" + path) | PATHS.map(lambda path: "s3://bucket" + path) | PATHS)
@example("file:///tmp/ck#a")
@example("file:///tmp/ck?x=1")
@example("s3://bucket/a?b#c")
@example("s3://bucket")
def test_the_uid_is_always_the_last_part_of_a_jobs_folder(base: str) -> None:
    try:
        folder = job_folder(base, UID)
    except AddressError:
        # A name that is not UTF-8 behind its percent signs, a line end behind them, `..` in a key.
        with pytest.raises(AddressError):
            checkpoint_address(base)
        return
    assert folder.name == UID
    assert folder != job_folder(base, UID[:-1] + "0")
    again = parse_address(str(folder))
    assert again == folder
    if folder.scheme == "file":
        assert folder.local.parent == parse_address(base).local
    else:
        assert folder.path.strip("/") == f"{base.removeprefix('s3://bucket').strip('/')}/{UID}".strip("/")


@given(st.text())
def test_any_text_is_an_address_or_refused_with_words(text: str) -> None:
    for read in (parse_address, checkpoint_address):
        try:
            address = read(text)
        except AddressError:
            continue
        assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("file:///a%20b/%2B+", StorageAddress("file", "", "/a b/++")),
        ("file://localhost/a//b/./c/", StorageAddress("file", "", "/a/b/c")),
        ("/a%20b", StorageAddress("file", "", "/a%20b")),
        ("data/*.jsonl", StorageAddress("file", "", "data/*.jsonl")),
        ("S3://bucket/a%20b/?x#y/", StorageAddress("s3", "bucket", "a%20b/?x#y/")),
        ("s3://bucket", StorageAddress("s3", "bucket", "")),
        ("https://Host.org:8443/a%20b?x=1", StorageAddress("https", "host.org:8443", "a%20b?x=1")),
        ("builtin://python-stdlib", StorageAddress("builtin", "", "python-stdlib")),
    ],
)
def test_what_an_address_means(text: str, means: StorageAddress) -> None:
    assert parse_address(text) == means


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://Qwen/Qwen3-0.6B", HubPath(None, "Qwen/Qwen3-0.6B", None, "")),
        ("hf://datasets/a/b@refs/pr/3/x/y.jsonl", HubPath("datasets", "a/b", "refs/pr/3", "x/y.jsonl")),
        ("hf://a/b@main/c", HubPath(None, "a/b", "main", "c")),
    ],
)
def test_the_parts_of_a_hub_address(text: str, parts: HubPath) -> None:
    assert hub_path(parse_address(text)) == parts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://key:secret@bucket/x", "no name of a bucket"),
        ("s3://bucket/a/../b", "which S3 servers understand differently"),
        ("file://data/books", "has three slashes"),
        ("file://", "has three slashes"),
        ("file:///a%00b", "control character"),
        ("file:///a%ff", "not of UTF-8"),
        ("http://host/x", "nothing reads http://"),
        ("https://user:secret@host/x", "more than a host"),
        ("https://169.254.169.254/latest", "metadata service"),
        ("https://[fd00:ec2::254]:443/x", "metadata service"),
        ("https://[::ffff:169.254.1.2]/x", "metadata service"),
        ("https://Metadata.Google.Internal./x", "metadata service"),
        ("hf://gpt2", "names no repository"),
        ("gs://bucket/x", "nothing reads gs://"),
        ("my data://x", "neither a path nor an address"),
        ("", "neither a path nor an address"),
    ],
)
def test_what_is_no_address_is_refused(text: str, says: str) -> None:
    with pytest.raises(AddressError, match=says) as raised:
        parse_address(text)
    assert "secret" not in str(raised.value)


METADATA = (
    "169.254.169.254", "2852039166", "0xa9fea9fe", "0xA9.254.0xa9fe", "169.254.43518", "0251.0376.0251.0376",
    "[fe80::1]", "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::1]", "[::ffff:169.254.169.254]", "100.100.100.200",
)  # fmt: skip


@pytest.mark.parametrize("host", METADATA)
def test_a_machines_own_metadata_is_no_endpoint_however_it_is_written(host: str) -> None:
    for text in (f"http://{host}/", f" https://me@{host}:80/latest?x", f"HTTP://{host}"):
        with pytest.raises(AddressError, match="metadata service"):
            refuse_metadata_url(text)


@pytest.mark.parametrize("text", ["169.254.169.254:80", "169.254.169.254", "[fe80::1]:3128/"])
def test_a_proxy_is_named_without_a_scheme(text: str) -> None:
    with pytest.raises(AddressError, match="metadata service"):
        refuse_metadata_url(text)


@given(st.integers(0, (1 << 32) - 1))
@example(0xA9FE0000)
def test_numbers_are_read_as_the_resolver_reads_them(number: int) -> None:
    address = socket.inet_ntoa(number.to_bytes(4, "big"))
    for text in (str(number), hex(number), f"0{number:o}", address):
        assert socket.inet_aton(text) == number.to_bytes(4, "big")
        assert is_metadata_host(text) == is_metadata_host(address)


@pytest.mark.parametrize(
    "text",
    [
        "", "metadata", "2852039166", "http://10.0.0.1/", "10.0.0.1:3128", "http://0/", "http://1.2.3.4.5/",
        "http://256.1.1/x", "http://hub.example.com/169.254.169.254", "http://089/", "http://face/",
        "http://[2001:db8::1]/", "169.254.169.254.csv",
    ],
)  # fmt: skip
def test_any_other_value_may_be_one(text: str) -> None:
    try:
        refuse_metadata_url(text)
    except AddressError as error:
        pytest.fail(f"{text!r} {error}")


@pytest.mark.parametrize("text", ["ckpt", "~/ckpt", "https://host/x", "hf://a/b", "builtin://python-stdlib"])
def test_commits_are_not_written_everywhere(text: str) -> None:
    with pytest.raises(AddressError, match="must be file:///an/absolute/path or s3://bucket/folder"):
        checkpoint_address(text)


@pytest.mark.parametrize("uid", ["", ".", "..", "a/b", "a b", "-a"])
def test_a_uid_that_is_no_name_makes_no_folder(uid: str) -> None:
    with pytest.raises(AddressError, match="is no uid of a job"):
        job_folder("s3://bucket/x", uid)
