"""Pages of metrics put together: one page that Prometheus' own parser reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from muster.local.metric_pages import merged


def page(value: float) -> str:
    registry = CollectorRegistry()
    Gauge("loss", "Loss", registry=registry).set(value)
    Counter("seconds", "By state", ["state"], registry=registry).labels('a "quoted" \\ state\n').inc(value)
    Histogram("step", "Steps", registry=registry, buckets=(1.0, 2.0)).observe(value)
    Gauge("rank_step", "Has its own", ["rank"], registry=registry).labels("7").set(value)
    return generate_latest(registry).decode()


def test_every_sample_keeps_its_value_and_gains_labels() -> None:
    whole = merged([({"rank": "0", "job": 'a"b\\c\nd'}, page(1.0)), ({"rank": "1", "job": "x"}, page(2.0))])
    families = {family.name: family for family in text_string_to_metric_families(whole)}
    assert [(sample.labels["rank"], sample.value) for sample in families["loss"].samples] == [("0", 1.0), ("1", 2.0)]
    assert families["loss"].samples[0].labels == {"rank": "0", "job": 'a"b\\c\nd'}
    assert (families["step"].type, families["seconds"].type) == ("histogram", "counter")
    state = {sample.labels["state"] for sample in families["seconds"].samples if sample.name == "seconds_total"}
    assert state == {'a "quoted" \\ state\n'}
    assert {sample.labels["rank"] for sample in families["rank_step"].samples} == {"7"}
    assert whole.count("# TYPE loss gauge") == 1, "each metric stands once, or its samples would not be read as one"


def test_rubbish_is_left_out() -> None:
    assert merged([({"a": "b"}, "\x00\n{nothing}\n<html>\nup 1\n# a comment\nbroken{\n")]) == 'up{a="b"} 1\n'
    assert merged([({}, 'up{x="y",} 1 1700000000000\n')]) == 'up{x="y"} 1 1700000000000\n'
    assert merged([]) == ""
