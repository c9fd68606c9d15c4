"""Decoding only what is read: pages, events, errors, and that it is enough for what reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.kubernetes.making import ended, pod_item

from muster.kube.fields import decoder
from muster.operator.kubernetes.pods import FIELDS, read_pod

EXTRA = {"managedFields": [{"manager": "muster-operator"}], "annotations": {"a": "b"}}
WAITING = {"name": "preflight", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
PLACED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-20T08:00:11Z"}
PODS = [
    pod_item(meta=EXTRA, spec={"containers": [{"name": "trainer", "env": []}]}),
    pod_item(spec={"nodeName": "", "schedulingGates": [{"name": "muster.dev/gang"}]}, status={"phase": "Pending"}),
    pod_item(status=ended(81, "no memory left")),
    pod_item(status={"phase": "Failed", "reason": "Evicted", "message": "disk pressure", "containerStatuses": None}),
    pod_item(status={"initContainerStatuses": [WAITING], "conditions": [PLACED]}),
    pod_item(meta={"deletionTimestamp": "2026-11-20T09:00:00Z", "deletionGracePeriodSeconds": 0}),
    pod_item(meta={"labels": None}) | {"status": None},
]


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_reads_the_same_from_a_page_and_from_an_event(pod: dict[str, Any]) -> None:
    decode = decoder(FIELDS)
    page = decode(json.dumps({"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": [pod]}).encode())
    event = decode(json.dumps({"type": "MODIFIED", "object": pod}).encode())
    assert page["metadata"] == {"resourceVersion": "7"}
    assert event["type"] == "MODIFIED"
    assert read_pod(page["items"][0]) == read_pod(event["object"]) == read_pod(pod)
    assert event["object"].keys() <= {"metadata", "spec", "status"}
    assert not event["object"]["metadata"].keys() & EXTRA.keys()


def test_what_is_no_object_is_told() -> None:
    decode = decoder(FIELDS)
    status = {
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": "too old",
        "reason": "Expired",
        "code": 410,
    }
    gone = {"type": "ERROR", "object": status}
    assert decode(json.dumps(gone).encode()) == gone
    assert decode(b'{"metadata": {}, "items": null}')["items"] is None
    with pytest.raises(ValueError):
        decode(b'{"type": "MODIF')
