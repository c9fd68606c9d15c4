"""A short replay of benchmarks/fairness.py: everybody gets on, and less is lost than by ending whoever began last."""

from benchmarks.fairness import POLICIES, alone, measure, trace


def test_the_cheapest_set_loses_less_than_the_newest_and_everybody_gets_on() -> None:
    jobs = trace(100, 8, 1.0, seed=3)
    by_itself = dict(alone(jobs, 8, seed=3))
    mine, newest, _ = (measure(jobs, 8, policy, by_itself, seed=3) for policy in POLICIES)
    assert mine["preemptions"] > 5
    assert mine["lost_gpu_hours"] < newest["lost_gpu_hours"] / 2
    assert mine["put_out_per_asked"] <= 1.25
    assert mine["fairness_max"] < float("inf"), "somebody never ended"
