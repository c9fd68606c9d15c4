"""Times are floats inside and RFC 3339 outside, and nothing is lost between the two."""

import json
from datetime import UTC, datetime
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster.recipe.schema import document_schema
from muster.replies.views import TIME_KEYS, status_view, with_times
from muster.words.base import dump, dump_json
from muster.words.signals import Cause
from muster.words.status import (
    STATUS_VERSION,
    Attempt,
    CheckpointStatus,
    Condition,
    ExcludedNode,
    Failure,
    GoodputAccount,
    JobStatus,
    NodeFault,
    Progress,
    Restart,
    Restarts,
    Suspicion,
)
from muster.words.times import LAST_SECOND, epoch_seconds, rfc3339

# To the microsecond, as a clock gives them, with more digits, and at the ends of what a date can say.
TIMES = (
    st.floats(0.0, LAST_SECOND) | st.floats(1.7e9, 1.9e9) | st.integers(0, 2 * 10**15).map(lambda micro: micro / 1e6)
)


def whole_status(times: Any) -> JobStatus:
    """A status with every time that it can hold, each the next of an iterator."""
    return JobStatus(
        since=next(times),
        progress=Progress(at=next(times)),
        checkpoint=CheckpointStatus(step=1, committed_at=next(times), uri="file:///ck"),
        restarts=Restarts(recent=(Restart(at=next(times), cause=Cause.HANG),)),
        retry_at=next(times),
        last_failure=Failure(cause=Cause.HANG, attempt=1, at=next(times), message="it hangs"),
        suspicion=Suspicion(at=next(times), beat_at=next(times), progressed_at=next(times)),
        node_faults=(NodeFault(node="a", at=next(times), why="it hangs"),),
        excluded_nodes=(ExcludedNode(node="a", until=next(times), why="it hangs"),),
        queued_at=next(times),
        started_at=next(times),
        finished_at=next(times),
        ledger=GoodputAccount(since=next(times), seconds={"queue": 1.5}),
        attempts=(
            Attempt(number=1, created_at=next(times), first_step_at=next(times), ended_at=next(times)),
            Attempt(number=2, created_at=next(times)),
        ),
        conditions=(
            Condition(type="Running", status="True", reason="Training", last_transition_time="2026-11-23T07:24:58Z"),
        ),
    )


COUNT = 19  # of the times of `whole_status`


def as_numbers(document: Any, key: str = "") -> Any:
    """The document as the release before wrote it."""
    if isinstance(document, dict):
        return {name: as_numbers(value, name) for name, value in document.items()} | (
            {"schemaVersion": 1} if "schemaVersion" in document else {}
        )
    if isinstance(document, list):
        return [as_numbers(value) for value in document]
    return epoch_seconds(document) if key in TIME_KEYS else document


@given(TIMES)
@example(0.0)
@example(1e-7)
@example(1795418698.1234567)
@example(LAST_SECOND)
def test_a_time_comes_back_as_the_very_same_number(seconds: float) -> None:
    text = rfc3339(seconds)
    assert epoch_seconds(text) == seconds
    assert datetime.fromisoformat(text) <= datetime.max.replace(tzinfo=UTC)


def test_a_time_reads_as_everybody_writes_it() -> None:
    assert rfc3339(1795418698.123456) == "2026-11-23T07:24:58.123456Z"
    assert rfc3339(1795418698) == "2026-11-23T07:24:58.000000Z"
    for text in ("2026-11-23T07:24:58Z", "2026-11-23t07:24:58.0z", "2026-11-23T09:24:58+02:00", 1795418698):
        assert epoch_seconds(text) == 1795418698.0


@pytest.mark.parametrize("seconds", [-1.0, float("-inf"), float("nan"), float("inf"), 1e300])
def test_what_no_date_can_say_becomes_the_nearest_that_can(seconds: float) -> None:
    assert epoch_seconds(rfc3339(seconds)) == epoch_seconds(seconds) == (LAST_SECOND if seconds > 0 else 0.0)


@pytest.mark.parametrize(
    "text", ["", "yesterday", "1795418698", "2026-11-23", "2026-13-01T00:00:00Z", "2026-11-23T07:24:58"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"RFC 3339|month"):
        epoch_seconds(text)


@given(st.lists(TIMES, min_size=COUNT, max_size=COUNT))
def test_a_status_comes_back_as_it_was_decided(times: list[float]) -> None:
    status = whole_status(iter(times))
    assert JobStatus.model_validate(dump(status)) == status
    assert JobStatus.model_validate_json(dump_json(status)) == status


@given(st.lists(TIMES, min_size=COUNT, max_size=COUNT))
def test_a_status_of_the_release_before_is_read(times: list[float]) -> None:
    status = whole_status(iter(times))
    before = as_numbers(dump(status))
    assert before["attempts"][0]["endedAt"] == status.attempts[0].ended_at
    expected = status.model_copy(update={"schema_version": 1})
    assert JobStatus.model_validate(before) == JobStatus.model_validate_json(json.dumps(before)) == expected
    assert with_times(before) == dump(expected)


def test_each_time_of_a_status_is_known_as_one() -> None:
    """Else a status of the release before would be shown with a number in its midst."""
    found = {
        name
        for schema in [JobStatus.model_json_schema(), *JobStatus.model_json_schema()["$defs"].values()]
        for name, field in schema.get("properties", {}).items()
        if any(choice.get("format") == "date-time" for choice in [field, *field.get("anyOf", [])])
    }
    assert found - {"lastTransitionTime"} <= TIME_KEYS
    assert TIME_KEYS - found == {"happenedAt"}  # of an event


def test_the_definition_takes_what_is_written_and_no_numbers() -> None:
    schema = document_schema()["properties"]["status"]
    formats = jsonschema.FormatChecker([])
    formats.checks("date-time", raises=ValueError)(lambda value: not isinstance(value, str) or epoch_seconds(value) > 0)
    checker = jsonschema.Draft202012Validator(schema, format_checker=formats)
    written = dump(whole_status(iter([1795418698.1234567] * COUNT)))
    checker.validate(written)
    assert len(list(checker.iter_errors(as_numbers(written)))) == COUNT
    assert len(list(checker.iter_errors({"since": "yesterday"}))) == 1
    since = schema["properties"]["ledger"]["properties"]["since"]
    assert (since["type"], since["format"]) == ("string", "date-time")


def test_no_rule_of_the_definition_compares_times() -> None:
    """The old ones may be numbers of the release before, which is not the type that the schema gives them."""
    rules = " ".join(rule["rule"] for rule in document_schema()["x-kubernetes-validations"])
    assert "oldSelf.status.ledger.seconds" in rules
    assert not [key for key in TIME_KEYS if f".{key}" in rules]


def test_a_view_has_times_whichever_release_wrote_the_status() -> None:
    status = JobStatus(since=1795418698.5, schema_version=STATUS_VERSION)
    old = {**as_numbers(dump(status)), "finishedAt": 1795418699, "novelty": {"deep": [1]}}
    shown = status_view(old)
    assert (shown["since"], shown["finishedAt"]) == ("2026-11-23T07:24:58.500000Z", "2026-11-23T07:24:59.000000Z")
    assert (shown["startedAt"], shown["novelty"]) == (None, {"deep": [1]})
