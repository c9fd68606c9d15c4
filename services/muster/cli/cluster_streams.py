"""Events and logs of a cluster's jobs as they happen, in the form in which the API streams them."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from muster.cli.cluster_objects import ClusterObjects
from muster.cli.cluster_views import event_view, status_of
from muster.client.exchange import StreamEvent
from muster.words.names import Phase

POLL_SECONDS = 1.0
ENDED = {str(phase) for phase in Phase if phase.terminal}


def events_after(
    objects: ClusterObjects, item: dict[str, Any], after: int, limit: int, kinds: list[str]
) -> list[dict[str, Any]]:
    """Return the events as the API shows them, numbered from 1: those after `after` and of these kinds (all for
    none)."""
    events = [event_view(number, event, item) for number, event in enumerate(objects.events(item), 1)]
    return [event for event in events if event["id"] > after and (not kinds or event["type"] in kinds)][:limit]


def follow_events(objects: ClusterObjects, name: str, after: int, kinds: list[str]) -> Iterator[StreamEvent]:
    """The job's events from `after` on, until it ends."""
    while True:
        item = objects.job(name)  # before the events: what the job says has its event by then
        for event in events_after(objects, item, after, 500, []):
            after = event["id"]
            if not kinds or event["type"] in kinds:
                yield StreamEvent(event["type"], json.dumps(event), str(after))
        if (phase := status_of(item)["phase"]) in ENDED:
            yield StreamEvent("end", json.dumps({"phase": phase}))
            return
        time.sleep(POLL_SECONDS)


def follow_logs(objects: ClusterObjects, name: str, params: dict[str, Any]) -> Iterator[StreamEvent]:
    """Attempt after attempt, each from its beginning (or its last lines, for the first that is followed)."""
    attempt, tail, followed = params.get("attempt"), params.get("tail"), 0
    while True:
        item = objects.job(name)
        status = status_of(item)
        current = attempt or status["attempt"]
        pods = objects.pods(item, current) if current > followed else {}
        chosen = {worker: pod for worker, pod in pods.items() if params.get("worker") in ("all", str(worker), worker)}
        if chosen:
            yield StreamEvent("attempt", json.dumps({"attempt": current}))
            for worker, line in _lines(objects, chosen, tail):
                yield StreamEvent("log", json.dumps({"attempt": current, "worker": worker, "line": line}))
            followed, tail = current, None
        elif status["phase"] in ENDED or (attempt is not None and followed):
            yield StreamEvent("end", json.dumps({"phase": status["phase"]}))
            return
        time.sleep(POLL_SECONDS)


def _lines(objects: ClusterObjects, pods: dict[int, str], tail: int | None) -> Iterator[tuple[int, str]]:
    """The lines of all these pods as they are written, until the last of them has ended."""
    lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()

    def read(worker: int, pod: str) -> None:
        while True:
            try:
                for line in _split(objects.open_log(pod, tail).stream(decode_content=True)):
                    lines.put((worker, line))
                break
            except Exception as error:  # not started yet, or gone: the status of the response says which
                if getattr(error, "status", 0) != 400:
                    break
                time.sleep(POLL_SECONDS)
        lines.put((worker, None))

    for worker, pod in pods.items():
        threading.Thread(target=read, args=(worker, pod), daemon=True, name=f"log of {pod}").start()
    reading = len(pods)
    while reading:
        worker, line = lines.get()
        if line is None:
            reading -= 1
        else:
            yield worker, line


def _split(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a stream of bytes, the last one too if it has no line break."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
