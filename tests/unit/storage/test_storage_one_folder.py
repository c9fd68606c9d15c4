"""Trainer, operator and API mean the same folder by the same text, whatever letters it has."""

import os
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.kubernetes.making import JOB_UID, make_job

from muster.api.core.database.tables import JobRow
from muster.api.core.jobs.repository import folder_of
from muster.cli.checkpoints import is_folder
from muster.operator.kubernetes.render import SiteSettings, checkpoint_folder
from muster.operator.local.environment import checkpoint_folder as local_checkpoint_folder
from muster.recipe.document import JobSpec
from muster.storage.listing import steps_in
from muster.storage.opening import open_store
from muster.storage.settings import S3Settings, platform_variables
from muster.trainer.config import folder_in
from muster.words.address import parse_address
from muster.words.checkpoint import commit_key
from muster.words.names import Env
from muster.words.state_folder import StateFolder

LETTERS = st.sampled_from(" %#?+&=;:@~*[]\\'\"äß日🙂\u0301abc")
NAMES = st.sampled_from(["my dir", "%20", "100%", "ck#a", "ck?x=1", "a+b", "日本", "...", "%41", "a%2Fb"]) | st.text(
    LETTERS, min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=3), st.booleans())
@example(["my dir"], True)
@example(["ck#a"], True)
@example(["ck?x=1"], True)
@example(["ck#a"], False)
def test_every_program_finds_what_the_trainer_committed(names: list[str], encoded: bool) -> None:
    """`my%20dir` was decoded by the trainer only, and `ck#a` lost its tail and the job's id in the trainer only."""
    with tempfile.TemporaryDirectory() as root:
        place = f"{root}/{'/'.join(names)}"
        uri = f"file://{quote(place)}" if encoded else f"file://{place.replace('%', '%25')}"
        Path(place).mkdir(parents=True)
        job = make_job(checkpoint={"uri": uri})
        told = checkpoint_folder(job, SiteSettings(image="trainer"))
        trainer = open_store(folder_in({Env.CHECKPOINT_URI: told}))
        assert trainer.create(commit_key(20), b"{}")
        assert os.path.exists(f"{place}/{JOB_UID}/{commit_key(20)}"), "the id is part of the folder"
        spec = JobSpec.model_validate(job.spec.model_dump(by_alias=True))
        row = JobRow(id=JOB_UID, spec={"checkpoint": {"uri": uri}})
        in_api = folder_of(row)
        in_local = local_checkpoint_folder(StateFolder(Path(root)), spec, JOB_UID)
        assert in_api is not None
        assert is_folder(str(in_api))
        for seen in (told, in_local, str(in_api)):
            assert steps_in(open_store(parse_address(seen))) == (20,)
        other = local_checkpoint_folder(StateFolder(Path(root)), spec, "another")
        assert steps_in(open_store(other)) == ()


def test_s3_is_reached_as_the_platform_says() -> None:
    given = {
        "MUSTER_S3_ENDPOINT": "https://minio.example.com",
        "MUSTER_S3_REGION": "eu-1",
        "MUSTER_S3_ADDRESSING": "virtual",
        "MUSTER_S3_KMS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL_S3": "https://other.example.com",
        "AWS_REGION": "us-west-2",
    }
    found = S3Settings.from_environment(given)
    assert (found.endpoint, found.region, found.addressing, found.kms_key_id) == (
        "https://minio.example.com", "eu-1", "virtual", "key",
    )  # fmt: skip
    handed_on = platform_variables(given)
    assert sorted(handed_on) == [f"MUSTER_S3_{name}" for name in ("ADDRESSING", "ENDPOINT", "KMS_KEY_ID", "REGION")]
    # What a job sets for itself changes nothing: the operator would look elsewhere.
    job = {"AWS_ENDPOINT_URL_S3": "https://a.job.example.com", "AWS_REGION": "eu-9"}
    assert S3Settings.from_environment(job | handed_on) == found


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION", "MUSTER_S3_REGION"])
def test_the_region_of_any_aws_client_is_heard(name: str) -> None:
    """botocore itself reads AWS_DEFAULT_REGION only, while our own words told people to set AWS_REGION."""
    assert S3Settings.from_environment({name: "eu-central-1"}).region == "eu-central-1"
