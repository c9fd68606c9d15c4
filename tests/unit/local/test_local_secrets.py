"""Workers of one machine get secrets when they start, and one that is not there is said plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.processes import environment_of

from muster.operator.core.causes import diagnose
from muster.operator.core.decision import CreateWorker, RemoveWorker
from muster.operator.core.observed import Rejection
from muster.operator.core.worker_summary import summarize_workers
from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.processes import WorkerKey
from muster.operator.local.reading import redacted_exit
from muster.operator.local.secrets import SecretMissing, SecretReader
from muster.operator.local.world import LocalWorld
from muster.recipe.document import JobSpec, parse_job
from muster.secrets.box import SecretBox, SecretsLocked
from muster.words.names import Env, Label, WorkerId
from muster.words.signals import WorkerExit
from muster.words.status import GangStatus, JobStatus, Phase

VALUE = "hf_a-value-that-nobody-is-shown"
HF_TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "value"}}}


class House:
    """A world whose one job, of project nlp, has this runtime and starts its first attempt."""

    def __init__(self, root: Path, **runtime: Any) -> None:
        self.world = LocalWorld(root, VirtualNodes(4), ("sleep", "600"), JobSpec)
        self.box = SecretBox(self.world.state.secret_key)
        spec = {
            "training": {
                "model": {"source": "hf://meta-llama/Llama-3.2-1B"},
                "data": {"train": [{"source": "x.txt"}]},
                "batch": {"tokensPerStep": 2048},
                "length": {"steps": 10},
            },
            "runtime": runtime,
            "checkpoint": {"kmsKeyId": "alias/nlp"},
        }
        submission = parse_job({"metadata": {"name": "tiny"}, "spec": spec})
        job = self.world.cluster.create("tiny", "nlp", submission.spec, {Label.PROJECT: "nlp"})
        self.uid = job.metadata.uid
        status = JobStatus(attempt=1, phase=Phase.STARTING, gang=GangStatus(wanted=1, nodes=("local-0",)))
        self.world.cluster.write_status(self.uid, status, job.metadata.resource_version)

    def set(self, name: str, project: str = "nlp", **data: str) -> None:
        self.world.cluster.write_secret(project, name, self.box.seal(project, name, data))

    async def create(self) -> None:
        await self.world.apply(self.uid, CreateWorker(WorkerId(1, 0), "local-0", ("local-0",), resume_step=0))

    def variables(self) -> dict[str, str]:
        return SecretReader(self.world.cluster, self.box.path).variables(self.world.cluster.get(self.uid))

    def environment(self) -> dict[str, str]:
        """Of the process that was started."""
        import psutil

        record = next(iter(self.world._workers.living()))
        return environment_of(psutil.Process(record.pid))


async def test_a_worker_gets_its_secrets_when_it_starts_and_they_are_in_no_file(tmp_path: Path) -> None:
    env_from = [{"secretRef": {"name": "wandb"}, "prefix": "W_"}, {"secretRef": {"name": "none", "optional": True}}]
    house = House(tmp_path, env=[HF_TOKEN, {"name": "W_MODE", "value": "own"}], envFrom=env_from)
    house.set("hf-token", value=VALUE)
    house.set("hf-token", project="cv", value="another project's")
    house.set("wandb", KEY="k1", MODE="its", **{"not.a.name": "x"})
    await house.create()
    environment = house.environment()
    assert environment[Env.S3_KMS_KEY] == "alias/nlp", "of the job's checkpoint"
    await house.world.stop_workers(0.0)
    wanted = ("HF_TOKEN", "W_KEY", "W_MODE", "W_not.a.name")
    assert {name: environment.get(Env.OWN_PREFIX + name) for name in wanted} == {
        "HF_TOKEN": VALUE, "W_KEY": "k1", "W_MODE": "own", "W_not.a.name": None,
    }  # fmt: skip
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and VALUE.encode() in file.read_bytes()]


async def test_a_job_whose_secret_is_gone_fails_by_its_user_and_says_what_to_do(tmp_path: Path) -> None:
    house = House(tmp_path, env=[HF_TOKEN])
    house.set("hf-token-2", value=VALUE)  # it was renamed
    await house.create()
    seen = await house.world.observe(house.uid)
    assert seen is not None
    (worker,) = seen.workers
    assert worker.rejection is Rejection.PERMANENT
    summary = summarize_workers(seen)
    later = type(seen)(**{**{name: getattr(seen, name) for name in seen.__slots__}, "now": seen.now + 10})
    assert summary.rejected == (worker,)
    diagnosis = diagnose(summarize_workers(later))
    assert diagnosis is not None
    assert (str(diagnosis.failure.cause), diagnosis.failure.message) == (
        "user_error",
        "worker 0 can't be created: project 'nlp' has no secret 'hf-token' (it has hf-token-2); "
        "spec.runtime.env[0].valueFrom.secretKeyRef names it: "
        "set it by `muster secrets set hf-token` and clone the job",
    )
    await house.world.apply(house.uid, RemoveWorker(WorkerId(1, 0), 0.0))
    again = await house.world.observe(house.uid, fresh=True)
    assert again is not None
    assert again.workers == ()


def test_an_entry_that_is_gone_and_a_key_that_is_lost_are_said(tmp_path: Path) -> None:
    house = House(tmp_path, env=[HF_TOKEN])
    house.set("hf-token", token=VALUE)
    with pytest.raises(
        SecretMissing, match=r"secret 'hf-token' of project 'nlp' has no entry 'value' \(it has token\)"
    ):
        house.variables()
    house.set("hf-token", value=VALUE)
    house.box.path.unlink()
    with pytest.raises(SecretMissing, match="put the file back"):
        house.variables()


def test_a_payload_counts_under_its_own_name_only(tmp_path: Path) -> None:
    box = SecretBox(tmp_path / "secret-key")
    payload = box.seal("cv", "hf-token", {"value": VALUE})
    assert box.open("cv", "hf-token", payload) == {"value": VALUE}
    for project, name in (("nlp", "hf-token"), ("cv", "other")):
        with pytest.raises(SecretsLocked, match="is another's"):
            box.open(project, name, payload)


@pytest.mark.parametrize(("text", "words"), [("", "is empty"), ("short\n", "32 bytes"), ("x" * 44, "32 bytes")])
def test_a_key_file_that_is_none_is_said(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "secret-key"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(SecretsLocked, match=words):
        SecretBox(path).seal("nlp", "a", {"value": VALUE})
    assert path.read_text() == text


async def test_what_a_worker_says_of_its_secret_is_not_shown(tmp_path: Path) -> None:
    house = House(tmp_path, envFrom=[{"secretRef": {"name": "plain"}}])
    house.set("plain", GREETING=VALUE)  # whatever the variable's name
    await house.create()
    key = WorkerKey(house.uid, 1, 0)
    environment = {f"SECRET_{n}": value for n, value in enumerate(house.variables().values())}
    said = redacted_exit(WorkerExit(exit_code=80, at=1.0, message=f"bad {VALUE}", log_tail=f"log {VALUE}"), environment)
    assert (said.message, said.log_tail) == ("bad ***", "log ***")
    await house.world.stop_workers(0.0)
    record = key.folder(house.world.state) / "exit.json"
    record.write_text(f'{{"exitCode": 80, "at": 1.0, "message": "bad {VALUE}", "logTail": ""}}')
    seen = await house.world.observe(house.uid, fresh=True)
    assert seen is not None
    assert [worker.exit.message for worker in seen.workers if worker.exit] == ["bad ***"]
