"""Messages of a save come out as they went in, and nothing else comes out."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from muster.trainer.checkpoint.entries import Entries
from muster.trainer.checkpoint.messages import (
    EndOrder,
    NewLayout,
    SaveChannel,
    SaveMessage,
    SaveOrder,
    ShareReport,
    StepsLeft,
    UploadInit,
    decode,
    encode,
)
from muster.words.checkpoint import FileEntry
from muster.words.job import Keep

FILE = FileEntry(key="step-00000007/x", bytes=12, checksum="ab", part_bytes=8, parts=("a", "b"))
INIT = UploadInit(
    uri="s3://bucket/uid",
    rank=1,
    world_size=2,
    job_uid="uid",
    attempt=3,
    worker=1,
    incarnation=2,
    fence="file:///fence",
    token="token",
    host="::1",
    port=2,
    keep=Keep(last=5),
    identity={"job": "x"},
    entries=Entries(Path("/watched"), None, rank=1, is_leader=False),
)
MESSAGES: list[SaveMessage] = [
    INIT,
    NewLayout(number=2, bytes=9, slices={"w": ["F32", [2], [0], [2], 64]}, stateless=["w"], groups=[["w"], []]),
    SaveOrder(
        seq=1, step=7, deadline_seconds=9.5, first=(1, 2), rng={"cpu": [1, 2]}, records=("{}",), commit={"a": 0.5}
    ),
    ShareReport(seq=1, step=7, file=FILE, slices={"w": ["F32", [2], [0], [2], 64]}, frozen_file=FILE),
    ShareReport(seq=1, step=7, error="the disk is full", refused=True),
    StepsLeft(left={7: (3, 1.5), 8: (4, 2.5)}),
    EndOrder(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_arrives_as_it_was_sent(message: SaveMessage) -> None:
    ours, theirs = (SaveChannel(each) for each in socket.socketpair())
    ours.send(message)
    assert theirs.receive(10) == message
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"no JSON",
        b'{"kind": "other"}',
        b'{"kind": "save", "seq": 1, "step": "x", "deadline_seconds": 1}',
        b'{"kind": "steps-left", "left": {"7": [1]}}',
        b'{"kind": "hello", "rank": 1}',
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode(body)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes"])
def test_what_json_has_not_is_never_sent(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode(SaveOrder(seq=1, step=7, deadline_seconds=9.5, rng={"state": value}))
