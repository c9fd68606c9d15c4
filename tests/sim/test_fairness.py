"""A short replay of benchmarks/fairness.py: everybody gets on, and less is lost than by ending whoever began last."""

from pathlib import Path

import pytest
from benchmarks.fairness import measure, setting
from benchmarks.fleet_replay import POLICIES, trace


def test_the_cheapest_set_loses_less_than_the_newest_and_everybody_gets_on() -> None:
    settings = [setting(100, 8, 1.0, seed) for seed in (3, 4, 5, 6)]
    mine, newest, _ = (measure(settings, policy) for policy in POLICIES)
    assert mine["preemptions"] > 20
    assert mine["lost_gpu_hours"] < newest["lost_gpu_hours"] / 2
    assert mine["put_out_per_asked"] <= 1.25
    assert mine["fairness_max"] < float("inf"), "somebody never ended"


def test_a_public_trace_is_replayed_by_its_own_columns(tmp_path: Path) -> None:
    rows = [(f"2020-04-01 00:{i:02d}:00", 600 + i, (1, 4, 16)[i % 3], f"group{i % 4}") for i in range(30)]
    rows += [("2020-04-01 00:10:00", 600, 0, "group0"), ("2020-04-01 00:11:00", "", 8, "group0")]
    read = []
    for columns in ("submit_time,duration,gpu_num,vc", "timestamp,duration,num_gpus,cluster"):
        path = tmp_path / "trace.csv"
        path.write_text("\n".join([columns, *(",".join(map(str, row)) for row in rows)]))
        read.append(trace(30, 8, 1.0, 1, path))
    assert read[0] == read[1]
    path.write_text(
        "\n".join(["job_id,arrival_s,service_sec,gpu_count", *(f"{i},{60 * i},{600 + i},8" for i in range(60))])
    )
    nameless = trace(60, 8, 1.0, 1, path)
    assert {job.project for job in nameless} == {"vision", "speech", "text"}, "dealt by the dice"
    assert [job.work for job in nameless] == [600 + i for i in range(60)]
    assert [job.arrives for job in read[0]] == sorted(job.arrives for job in read[0]), "in the trace's order"
    assert {(job.spec.gang.nodes.max, job.gpus) for job in read[0]} == {(1, 1), (1, 4), (2, 8)}
    assert {job.project for job in read[0]} == {"vision", "speech", "text"}
    gpu_seconds = sum(job.work * job.gpus for job in read[0])
    assert read[0][-1].arrives == pytest.approx(gpu_seconds / 64), "as much as the fleet has until the last arrives"
    with pytest.raises(SystemExit, match="has 60 jobs that can be replayed, and 61 are asked for"):
        trace(61, 8, 1.0, 1, path)
    path.write_text("timestamp,gpus\n")
    with pytest.raises(SystemExit, match="has no column duration or service_sec; it has timestamp, gpus"):
        trace(1, 8, 1.0, 1, path)
