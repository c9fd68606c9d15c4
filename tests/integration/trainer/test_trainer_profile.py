"""A real gang of two ranks is traced while it trains, and computes what it would have computed anyhow."""

import gzip
import json
from pathlib import Path

import pytest
from tests.integration.trainer.gangs import Job, training, write_corpus

from muster.words.base import dump_json
from muster.words.profiles import PROFILES, REQUEST_KEY, Profile, ProfileRequest, RankProfile

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_both_ranks_of_a_gang_are_traced_and_learn_the_same_bits(tmp_path: Path, shard: str) -> None:
    document = training(
        write_corpus(tmp_path / "corpus"), parallel={"shard": shard}, deterministic=True, length={"steps": 60}
    )
    calm, traced = (Job(tmp_path / name, document, {"every": 7}, uid=name) for name in ("calm", "traced"))
    traced.folder.mkdir(parents=True)
    request = ProfileRequest(id="asked", attempt=1, steps=9, ranks=(0, 1), at=1.8e9)
    (traced.folder / REQUEST_KEY).write_text(dump_json(request))
    for job in (calm, traced):
        job.start(ranks=2, forked=True).ends_well()
    (at,) = (traced.folder / PROFILES).iterdir()
    begun = Profile.model_validate_json((at / "profile.json").read_text())
    for rank in (0, 1):
        done = RankProfile.model_validate_json((at / f"rank-{rank}.json").read_text())
        assert (done.steps, done.fault) == (9, "")
        events = json.loads(gzip.decompress((at / f"rank-{rank}.trace.json.gz").read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X"]
        steps = [name for name in names if name.startswith("ProfilerStep")]
        assert steps == [f"ProfilerStep#{begun.step + number}" for number in range(9)]
        assert any("mm" in name and name.startswith("aten::") for name in names)
        assert any("all_reduce" in name or "allreduce" in name for name in names), sorted(set(names))
    expected, found = ([(r.step, r.loss, r.grad_norm) for r in job.steps(1)] for job in (calm, traced))
    assert found == expected
    assert not (calm.folder / PROFILES).exists()
