"""Models in S3 and on the web: two ranks read each byte once, and train as from a folder."""

from __future__ import annotations

import http.client
import http.server
import itertools
import re
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.gangs import Job, Part, train_many, training, write_corpus
from tests.model_families import write_model
from tests.s3_servers import BUCKET, KEYS, moto_server

from muster.words.names import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 2
Ranges = dict[str, list[tuple[int, int]]]


class _Counted(http.server.BaseHTTPRequestHandler):
    """Notes the ranges that are asked for, by file name."""

    protocol_version = "HTTP/1.1"
    asked: Ranges
    upstream: str
    folder: Path

    def log_message(self, *_: object) -> None:
        pass

    def note(self) -> None:
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            name = self.path.partition("?")[0].rpartition("/")[2]
            self.asked.setdefault(name, []).append((int(found[1]), int(found[2]) + 1))

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Proxy(_Counted):
    """Before a server of S3."""

    def do_GET(self) -> None:
        self.note()
        connection = http.client.HTTPConnection(self.upstream)
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection.request(self.command, self.path, sent, dict(self.headers))
        reply = connection.getresponse()
        body = reply.read()
        headers = {k: v for k, v in reply.getheaders() if k.lower() not in ("transfer-encoding", "content-length")}
        length = reply.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.answer(reply.status, {**headers, "Content-Length": length}, body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


class Web(_Counted):
    """A folder, by https."""

    def do_GET(self) -> None:
        path = self.folder / self.path.removeprefix("/model/")
        if not path.is_file():
            return self.answer(404, {"Content-Length": "0"}, b"")
        self.note()
        whole, asked = path.read_bytes(), self.headers.get("Range")
        first, last = asked.removeprefix("bytes=").split("-") if asked else ("0", "")
        body = whole[int(first) : int(last) + 1 if last else None]
        more = {"Content-Range": f"bytes {first}-{int(first) + len(body) - 1}/{len(whole)}"} if asked else {}
        self.answer(206 if asked else 200, {"Content-Length": str(len(body)), "ETag": f'"{len(whole)}"', **more}, body)

    do_HEAD = do_GET


@contextmanager
def served(kind: type[_Counted], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    key, made = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", made],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return context, made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Job], dict[str, Ranges], Path]:
    """One model from a folder, from S3 and from the web, on two ranks under fsdp; and what was asked of the two."""
    root = tmp_path_factory.mktemp("sources")
    source = write_corpus(root / "corpus")
    write_model(root / "model", "llama-3.1", dtype=torch.bfloat16)
    asked: dict[str, Ranges] = {"s3": {}, "https": {}}
    tls, trusted = certificate(root)
    web = type("CountedWeb", (Web,), {"asked": asked["https"], "folder": root / "model"})
    with pytest.MonkeyPatch.context() as patch, moto_server() as bucket, served(web, tls) as https:
        for path in filter(Path.is_file, (root / "model").rglob("*")):
            name = path.relative_to(root / "model").as_posix()
            bucket.client().upload_file(str(path), BUCKET, f"models/tiny/{name}")
        upstream = {"asked": asked["s3"], "upstream": bucket.url.removeprefix("http://")}
        with served(type("CountedProxy", (Proxy,), upstream)) as proxy:
            environment = {
                **KEYS,
                "MUSTER_S3_ENDPOINT": f"http://127.0.0.1:{proxy}",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            for name, value in {**environment, "SSL_CERT_FILE": str(trusted)}.items():
                patch.setenv(name, value)
            addresses = {
                "file": (root / "model").as_uri(),
                "s3": f"s3://{BUCKET}/models/tiny",
                "https": f"https://localhost:{https}/model",
            }
            jobs = {kind: Job(root / kind, document(source, address), uid=kind) for kind, address in addresses.items()}
            assert train_many(root / "two", 2, [*map(Part, jobs.values())]) == [ExitCode.DONE] * len(jobs)
    return jobs, asked, root / "model"


def document(source: str, address: str) -> dict[str, Any]:
    return training(
        source,
        model={"source": address},
        batch={"tokensPerStep": 256, "microBatch": 2},
        length={"steps": STEPS},
        parallel={"shard": "fsdp"},
        deterministic=True,
    )


@pytest.mark.parametrize("kind", ["s3", "https"])
def test_a_model_far_away_trains_as_one_in_a_folder(trained: Any, kind: str) -> None:
    jobs, _, _ = trained
    here, there = (jobs[name].commit(STEPS)["architecture"]["source"] for name in ("file", kind))
    assert there["crc32"] == here["crc32"]
    assert there["address"] != here["address"]
    assert [r.loss for r in jobs[kind].steps(1)] == [r.loss for r in jobs["file"].steps(1)]


@pytest.mark.parametrize("kind", ["s3", "https"])
def test_two_ranks_read_each_byte_of_the_weights_once(trained: Any, kind: str) -> None:
    """Beside the headers, and the last byte of each file, by which both see that it is whole."""
    _, asked, folder = trained
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    for path in files:
        (header,) = struct.unpack("<Q", path.read_bytes()[:8])
        size = path.stat().st_size
        ranges = sorted(r for r in asked[kind][path.name] if r[0] >= 8 + header and r != (size - 1, size))
        assert ranges[0][0] == 8 + header
        assert ranges[-1][1] == size
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges)), path.name
