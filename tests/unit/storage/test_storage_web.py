"""Data of the web: signed links, servers that refuse HEAD, and what is there in place of a file. Folders likewise."""

import gzip
import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from muster.recipe.data_config import Source
from muster.storage.data_check import check
from muster.storage.data_format import of_known_format
from muster.storage.errors import StorageError
from muster.storage.records import read_records
from muster.storage.sources import LocalFile, find
from muster.trainer.data.reading import FileReading
from muster.trainer.data.tokenizer import ByteTokenizer
from muster.words.base import UserError
from muster.words.redaction import redact

LINES = b"".join(
    b'{"messages": [{"role": "user", "content": "hi %d"}, {"role": "assistant", "content": "hello"}]}\n' % number
    for number in range(4)
)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123\n"
PAGE = b"<!DOCTYPE html><html>Sign in</html>"
SECRET = "X-Goog-Signature=5ecre7&X-Goog-Credential=5ecre7&Key-Pair-Id=5ecre7&sig=5ecre7"


class Web(http.server.BaseHTTPRequestHandler):
    """Answers by the first part of the path: what it says to HEAD, or what is there."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind = self.path.partition("?")[0].split("/")[1]
        kind, _, refusal = kind.partition("-")
        if refusal and self.command == "HEAD":
            return self.answer(int(refusal), b"")
        if kind == "denied":
            return self.answer(403, b"")
        body = {"page": PAGE, "pointer": POINTER, "empty": b"", "gz": gzip.compress(LINES)}.get(kind, LINES)
        asked = self.headers.get("Range")
        if asked is None or kind == "whole":
            return self.answer(200, body)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if int(first) >= len(body):
            return self.answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
        part = body[int(first) : int(last) + 1 if last else None]
        if kind == "vague":
            return self.answer(206, body[int(first) :])
        self.answer(206, part, {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"ETag": '"x"', "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", folder / "both", "-out", folder / "cert", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    (folder / "both").write_text((folder / "both").read_text() + (folder / "cert").read_text())
    return folder


@pytest.fixture
def web(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "both")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def format_of(address: str, format: str = "auto") -> tuple[str, list[object]]:
    """The format that is found, and the first value."""
    source, files = of_known_format(Source(source=address, format=format), find(address, format))
    assert source.format != "text"
    return source.format, [record.value for file in files for record in read_records(file, {})]


@pytest.mark.parametrize(
    "path",
    [
        *(f"plain-{status}/a.jsonl" for status in (400, 403, 405, 501)),
        *(
            "plain/a.jsonl",
            "plain/a.jsonlines",
            "gz/a.jsonl.gz",
            "plain/download",
            "whole-403/a",
            "vague-403/a.jsonl",
            "whole/a.jsonl",
        ),
    ],
)
@pytest.mark.parametrize("query", ["", "?download=true", f"?{SECRET}"])
def test_a_link_is_read_as_what_its_path_says(web: str, path: str, query: str) -> None:
    format, records = format_of(f"{web}/{path}{query}")
    assert (format, len(records)) == ("openai-chat", 4)


def test_an_empty_file_has_no_first_byte(web: str) -> None:
    (file,) = find(f"{web}/empty-403/a.jsonl?{SECRET}", "auto")
    assert file.size == 0


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("page/a.jsonl", "/page/a.jsonl: is an HTML page, and not data"),
        ("page/download", "/page/download: is an HTML page, and not data"),
        ("pointer/a.jsonl", "/pointer/a.jsonl: is a pointer of Git LFS"),
        ("plain/a.txt", "/plain/a.txt: begins as records in JSON, and its ending does not say so"),
        ("denied/a.jsonl", "/denied/a.jsonl: can't read it: 403"),
    ],
)
def test_what_is_no_data_is_called_what_it_is_and_no_secret_is_told(web: str, path: str, says: str) -> None:
    with pytest.raises((UserError, StorageError), match=says) as caught:
        format_of(f"{web}/{path}?{SECRET}")
    assert "5ecre7" not in str(caught.value)


def test_secrets_of_signed_links_are_hidden_in_any_text() -> None:
    assert "5ecre7" not in redact(f"data source https://host/a.jsonl?{SECRET}: holds nothing")
    assert redact("https://host/a.jsonl?download=true&page=2") == "https://host/a.jsonl?download=true&page=2"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a", LINES, None),
        ("a", b"[" + b",".join(LINES.splitlines()) + b"]", None),
        ("a.jsonlines", LINES, None),
        ("a.txt", LINES, "begins as records in JSON"),
        ("a.jsonl", POINTER, "is a pointer of Git LFS"),
        ("a.txt", POINTER, "is a pointer of Git LFS"),
        ("a.jsonl", PAGE, "is an HTML page"),
    ],
)
def test_files_of_a_folder_and_uploads_are_looked_at_likewise(
    tmp_path: Path, name: str, content: bytes, says: str | None
) -> None:
    (tmp_path / name).write_bytes(content)
    (file,) = find(str(tmp_path / name), "text")
    checked = check(file, name)
    if says is None:
        assert format_of(str(tmp_path / name))[0] == checked.format == "openai-chat"
        return
    assert says in checked.fault
    with pytest.raises(UserError, match=says):
        format_of(str(tmp_path / name))


def test_a_folder_of_many_small_texts_is_not_read_to_find_its_format(tmp_path: Path) -> None:
    """Each file of a bucket would be a request, one after the other, before every attempt."""
    opened = []

    class Seen(LocalFile):
        def open(self) -> BinaryIO:
            opened.append(self.address)
            return super().open()

    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text("Plain words.\n")
    (tmp_path / "zzz.txt").write_bytes(POINTER)
    files = [
        Seen(file.path, file.size, file.stamp) for file in find(str(tmp_path), "text") if isinstance(file, LocalFile)
    ]
    source, found = of_known_format(Source(source=str(tmp_path), format="text"), files)
    assert (len(found), len(opened)) == (101, 16)
    with pytest.raises(UserError, match=r"zzz.txt: is a pointer of Git LFS"):
        list(FileReading(found[-1]).units(source, ByteTokenizer()))


@pytest.mark.parametrize("content", [b"Plain words.\n", b"{\n  x\n}", b"[1, 2]\n", b"{% if x %}\n", PAGE])
def test_texts_stay_texts(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.html").write_bytes(content)
    source, _ = of_known_format(Source(source=str(tmp_path / "a.html")), find(str(tmp_path / "a.html"), "auto"))
    assert source.format == "text"
