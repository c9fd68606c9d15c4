"""What a project lets its jobs name."""

from __future__ import annotations

from typing import Any

import pytest

from muster.api.core.admission_policy import LimitedProject, limit_entries
from muster.api.core.limits import ProjectLimits, limit_problems, with_defaults
from muster.api.core.roles import Role
from muster.recipe.document import JobSpec, parse_job

TRAINING: dict[str, Any] = {
    "model": {"preset": "muster-1m"},
    "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
    "batch": {"tokensPerStep": 16_384, "microBatch": 8},
    "length": {"steps": 200},
}


def job(**spec: Any) -> JobSpec:
    return parse_job({"metadata": {"name": "demo"}, "spec": {"training": TRAINING, **spec}}).spec


@pytest.mark.parametrize(
    ("uri", "prefix", "inside"),
    [
        ("s3://ckpt/nlp", "s3://ckpt/nlp", True),
        ("s3://ckpt/nlp/a", "s3://ckpt/nlp/", True),
        ("s3://ckpt/nlp2", "s3://ckpt/nlp", False),
        ("s3://other/nlp/a", "s3://ckpt/nlp", False),
        ("file:///ckpt/nlp", "s3://ckpt/nlp", False),
        ("s3://ckpt/x", "s3://ckpt", True),
        ("file:///data/nlp/../cv", "file:///data/nlp", False),
        ("file:///data/nlp/%2e%2e/cv", "file:///data/nlp", False),
    ],
)
def test_a_checkpoint_folder_lies_under_its_prefix(uri: str, prefix: str, inside: bool) -> None:
    found = limit_problems(job(checkpoint={"uri": uri}), ProjectLimits(checkpoint_prefix=prefix), "nlp")
    assert [fault.path for fault in found] == ([] if inside else ["spec.checkpoint.uri"])


def test_a_teacher_is_read_under_the_prefixes_of_data() -> None:
    training = TRAINING | {"distillation": {"teacher": {"source": "s3://models/cv/large"}}}
    found = limit_problems(job(training=training), ProjectLimits(data_prefixes=("s3://data/nlp",)), "nlp")
    assert "spec.training.distillation.teacher.source" in [fault.path for fault in found]


def test_a_job_that_says_nothing_gets_its_projects_defaults() -> None:
    limits = ProjectLimits(
        service_account="nlp",
        checkpoint_prefix="s3://ckpt/nlp",
        kms_key_id="alias/nlp",
        queue="nlp",
        instance_types=("p5.48xlarge",),
    )
    made = with_defaults(job(gang={"scheduler": {"kind": "kueue"}}), limits)
    assert (made.checkpoint.uri, made.checkpoint.kms_key_id) == ("s3://ckpt/nlp", "alias/nlp")
    assert made.checkpoint.variables == {"MUSTER_S3_KMS_KEY_ID": "alias/nlp"}
    assert made.runtime.service_account_name == "nlp"
    assert (made.gang.scheduler.queue, made.gang.instance_types) == ("nlp", ("p5.48xlarge",))
    assert limit_problems(made, limits, "nlp") == ()
    assert with_defaults(job(), ProjectLimits()) == job()


def test_every_size_of_an_elastic_gang_is_allowed_or_none() -> None:
    limits = ProjectLimits(gang_sizes=(1, 2))
    assert limit_problems(job(gang={"nodes": {"min": 1, "max": 2}}), limits, "nlp") == ()
    (found,) = limit_problems(job(gang={"nodes": {"min": 1, "max": 4}}), limits, "nlp")
    assert str(found) == "spec.gang.nodes: project 'nlp' has gangs of 1, 2 nodes; choose one of these"


def test_roles_include_those_before_them() -> None:
    assert [Role.MAINTAINER.covers(role) for role in Role] == [True, True, True, False]


def test_limits_are_written_for_the_admission_policy_only_where_they_are() -> None:
    limits = ProjectLimits(
        gang_sizes=(1, 2), checkpoint_prefix="s3://checkpoints/nlp/", data_prefixes=("s3://data/nlp/",), images=()
    )
    projects = [LimitedProject("nlp", "team-nlp", limits), LimitedProject("default", None, ProjectLimits())]
    assert limit_entries(projects) == {
        "team-nlp.project": "nlp",
        "team-nlp.gangSizes": "1\n2",
        "team-nlp.images": "",
        "team-nlp.checkpointPrefix": "s3://checkpoints/nlp",
        "team-nlp.dataPrefixes": "s3://data/nlp\ns3://checkpoints/nlp",
        "_default.project": "default",
    }
