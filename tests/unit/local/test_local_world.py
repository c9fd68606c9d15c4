"""The local world answers the operator's nine questions from files and processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.processes import environment_of

from muster.local.cluster import VersionConflict
from muster.local.sandbox import Sandbox
from muster.operator.core.decision import CreateWorker, RemoveJob, RemoveWorker
from muster.operator.core.observed import NodeReservation, ObservedJob, ObservedWorker, WorkerState, from_json, to_json
from muster.operator.local import processes
from muster.operator.local.nodes import PORTS, VirtualNodes, free_ports, rendezvous_port
from muster.operator.local.processes import WorkerKey
from muster.operator.local.world import LocalWorld
from muster.operator.world import UnreadableDocument
from muster.recipe.document import JobSpec, TrainingJob, WorkerConfig, parse_job
from muster.words.base import dump_json
from muster.words.job import Runtime
from muster.words.names import DEFAULT_PROJECT, Env, WorkerId
from muster.words.notices import NOTICES_ENV
from muster.words.quotas import ProjectQuota, Quota
from muster.words.signals import WorkerExit
from muster.words.status import GangStatus, JobStatus, Phase

SLEEP = ("sleep", "600")
NODES = ("local-0", "local-1")


def spec(**gang: Any) -> dict[str, Any]:
    return {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "x.txt"}]},
            "batch": {"tokensPerStep": 2048},
            "length": {"steps": 10},
        },
        "gang": {"nodes": 2} | gang,
        "runtime": {"env": [{"name": "HF_TOKEN", "value": "hunter2-hunter2"}, {"name": "MODE", "value": "fast"}]},
    }


class House:
    """A world and one job in it, whose status says attempt 1."""

    def __init__(self, root: Path, command: tuple[str, ...] = SLEEP, gpus_per_node: int = 0, **gang: Any) -> None:
        self.world = LocalWorld(root, VirtualNodes(4, gpus_per_node), command, JobSpec)
        submission = parse_job({"metadata": {"name": "tiny"}, "spec": spec(**gang)})
        self.uid = self.world.cluster.create("tiny", "default", submission.spec, {}).metadata.uid
        self.set_attempt(1)

    @property
    def job(self) -> TrainingJob:
        return self.world.cluster.get(self.uid)

    def set_attempt(self, attempt: int, phase: Phase = Phase.STARTING, incarnations: tuple[int, ...] = ()) -> None:
        gang = GangStatus(wanted=2, nodes=NODES, incarnations=incarnations)
        status = self.job.status.model_copy(update={"attempt": attempt, "phase": phase, "gang": gang})
        self.world.cluster.write_status(self.uid, status, self.job.metadata.resource_version)

    async def create(self, worker: int = 0, attempt: int = 1, node: str | None = None, incarnation: int = 1) -> None:
        id = WorkerId(attempt, worker, incarnation)
        await self.world.apply(self.uid, CreateWorker(id, node or NODES[worker], NODES, resume_step=0))

    async def observe(self, fresh: bool = False) -> ObservedJob:
        seen = await self.world.observe(self.uid, fresh)
        assert seen is not None
        return seen

    async def worker(self, fresh: bool = False) -> ObservedWorker:
        (worker,) = (await self.observe(fresh)).workers
        return worker

    def key(self, worker: int = 0, attempt: int = 1) -> WorkerKey:
        return WorkerKey(self.uid, attempt, worker)

    def pid(self, worker: int = 0, attempt: int = 1) -> int:
        record = processes.read_record(self.world.state, self.key(worker, attempt))
        assert record is not None
        return record.pid

    def environment(self, worker: int = 0) -> dict[str, str]:
        return environment_of(psutil.Process(self.pid(worker)))


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    yield house
    await house.world.stop_workers(0.0)


async def test_a_gang_is_made_seen_and_removed(house: House) -> None:
    assert (await house.observe()).workers == ()
    for worker in (0, 1, 1, 0):
        await house.create(worker)
    seen = await house.observe()
    assert [(w.worker, w.attempt, w.node, w.state, w.exit) for w in seen.workers] == [
        (0, 1, "local-0", WorkerState.RUNNING, None),
        (1, 1, "local-1", WorkerState.RUNNING, None),
    ]
    assert len(processes.scan(house.world.state)) == 2
    for worker in (0, 1):
        await house.world.apply(house.uid, RemoveWorker(WorkerId(1, worker), grace_seconds=600))
    assert all(worker.removing for worker in (await house.observe()).workers), "those that are not gone yet"
    await house.world._removals.finish()
    assert (await house.observe()).workers == (await house.observe(fresh=True)).workers == ()
    assert house.key().folder(house.world.state).joinpath("log").exists(), "logs outlive the process"


async def test_what_is_observed_can_be_written_down_and_read_again(house: House) -> None:
    await house.create(0)
    seen = await house.observe(fresh=True)
    assert to_json(from_json(to_json(seen))) == to_json(seen)
    assert (seen.name, seen.fresh, seen.checkpoint_uri) == (
        "tiny",
        True,
        f"file://{house.world.state.checkpoints}/{house.uid}",
    )


async def test_a_worker_of_another_attempt_is_refused(house: House) -> None:
    with pytest.raises(
        VersionConflict, match=r"attempt 2 of job .* is not one that starts: worker 0 of attempt 1 is, and Starting"
    ):
        await house.create(attempt=2)
    house.set_attempt(2)
    with pytest.raises(VersionConflict, match="attempt 1 of job"):
        await house.create(attempt=1)
    house.set_attempt(2, Phase.SUSPENDED)
    with pytest.raises(VersionConflict, match="attempt 2 is, and Suspended"):
        await house.create(attempt=2)
    assert processes.scan(house.world.state) == ()


async def test_lives_of_a_worker_are_apart(house: House) -> None:
    await house.create(1)
    house.set_attempt(1, incarnations=(1, 2))
    with pytest.raises(
        VersionConflict, match=r"worker 1 of attempt 1 of job .*: worker 1 of attempt 1, incarnation 2 is"
    ):
        await house.create(1)
    await house.create(1, incarnation=2)
    seen = await house.observe(fresh=True)
    assert [(worker.id, worker.state) for worker in seen.workers] == [
        (WorkerId(1, 1, 1), WorkerState.RUNNING),
        (WorkerId(1, 1, 2), WorkerState.RUNNING),
    ]
    second = WorkerKey(house.uid, 1, 1, 2)
    assert second.folder(house.world.state).name == "worker-1-i2"
    await house.world.apply(house.uid, RemoveWorker(WorkerId(1, 1, 1), grace_seconds=0))
    await house.world._removals.finish()
    assert [worker.id for worker in (await house.observe(fresh=True)).workers] == [WorkerId(1, 1, 2)]
    assert [record.key for record in house.world._workers.living()] == [second]


async def test_workers_that_an_earlier_release_started_are_first_lives(house: House) -> None:
    """Neither their variables nor their records name an incarnation: they are found, adopted and removed as before."""
    key = house.key()
    marks = processes.marks(house.world.state, key)
    del marks[Env.INCARNATION]
    assert processes.start(house.world.state, key, "local-0", SLEEP, dict(os.environ) | marks) is not None
    path = key.folder(house.world.state) / processes.RECORD
    record = json.loads(path.read_text())
    del record["incarnation"]
    path.write_text(json.dumps(record))
    worker = await house.worker(fresh=True)
    assert (worker.id, worker.state) == (WorkerId(1, 0, 1), WorkerState.RUNNING)
    await house.create(0)
    ours, strays = await house.world.adopt()
    assert ([record.key for record in ours], strays) == ([key], ())
    await house.world.apply(house.uid, RemoveWorker(WorkerId(1, 0), grace_seconds=0))
    await house.world._removals.finish()
    assert processes.scan(house.world.state) == ()


async def test_a_worker_is_told_all_it_needs_and_nothing_of_ours(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_API_DATABASE", "postgresql://user:password@host/db")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("OMP_NUM_THREADS")
    await house.create(0)
    await house.create(1)
    first, second = house.environment(0), house.environment(1)
    state = house.world.state
    port = int(first["PET_MASTER_PORT"])
    assert port in PORTS
    assert {name: first[name] for name in first if name.startswith(("MUSTER_", "PET_"))} == {
        Env.JOB: "tiny",
        Env.JOB_UID: house.uid,
        Env.ATTEMPT: "1",
        Env.WORKER: "0",
        Env.INCARNATION: "1",
        Env.RESUME_STEP: "0",
        Env.CHECKPOINT_URI: f"file://{state.checkpoints}/{house.uid}",
        Env.CONFIG: dump_json(WorkerConfig(training=house.job.spec.training, checkpoint=house.job.spec.checkpoint)),
        Env.WORKER_DIR: str(state.worker(house.uid, 1, 0)),
        Env.CACHE_DIR: str(state.cache / "default"),
        Env.DEVICE: "cpu",
        Env.FENCE: f"file://{state.jobs}/{house.uid}/fence.json",
        Env.SANDBOX: first[Env.SANDBOX],
        "MUSTER_OWN_HF_TOKEN": "hunter2-hunter2",
        "MUSTER_OWN_MODE": "fast",
        NOTICES_ENV: str(state.notices / "local-0.json"),
        "MUSTER_NODE": "local-0",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {Env.WORKER, Env.WORKER_DIR, Env.SANDBOX, NOTICES_ENV, "MUSTER_NODE", "PET_NODE_RANK"}
    assert first["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert {"RANK", "HF_TOKEN", "MODE"}.isdisjoint(first), (
        "the job's own count once the launcher has given up its rights"
    )


async def test_what_the_machines_user_has_exported_is_not_the_jobs(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is somebody's code: it may read its own environment, and find nothing there to take away."""
    secrets = {
        "GITHUB_TOKEN": "ghp_0", "DATABASE_URL": "postgresql://u:p@h/db", "SSH_AUTH_SOCK": "/run/agent",
        "WANDB_API_KEY": "w", "PGPASSWORD": "p", "MUSTER_TOKEN": "t",
        "PET_NNODES": "9", "TORCHELASTIC_RUN_ID": "outer", "WORLD_SIZE": "8",
    }  # fmt: skip
    needed = {"AWS_REGION": "eu-north-1", "CUDA_HOME": "/opt/cuda", "https_proxy": "http://proxy:3128", "LC_ALL": "C"}
    for name, value in {**secrets, **needed, "TEAM_ENDPOINT": "http://here", "TEAM_TOKEN": "t"}.items():
        monkeypatch.setenv(name, value)
    house.world._starter.how = replace(house.world._starter.how, inherited=("TEAM_ENDPOINT",))
    await house.create(0)
    given = house.environment(0)
    assert {name: given.get(name) for name in needed} == needed
    assert given["TEAM_ENDPOINT"] == "http://here"
    assert given["PET_NNODES"] == "2"
    assert (secrets.keys() - {"PET_NNODES"} | {"TEAM_TOKEN"}) & given.keys() == set()


@pytest.mark.parametrize("hub_cache", ["", "/big/hub"])
async def test_a_programs_downloads_lie_in_its_projects_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_cache: str
) -> None:
    """The program may write its downloads, which outlive its attempts; the machine's own are read-only."""
    monkeypatch.setenv("HF_HOME", "/big")
    if hub_cache:
        monkeypatch.setenv("HF_HUB_CACHE", hub_cache)
    house = House(tmp_path)
    program = {"program": {"command": ["train.py"]}, "gang": {"nodes": 2}}
    submission = parse_job({"metadata": {"name": "mine"}, "spec": program})
    house.uid = house.world.cluster.create("mine", "default", submission.spec, {}).metadata.uid
    house.set_attempt(1)
    try:
        await house.create(0)
        given = house.environment(0)
        own = house.world.state.cache / DEFAULT_PROJECT
        assert {name: given.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH", Env.HUB_CACHE)} == {
            "HF_HOME": f"{own}/huggingface",
            "HF_HUB_CACHE": None,
            "HF_TOKEN_PATH": "/big/token",
            Env.HUB_CACHE: hub_cache or "/big/hub",
        }
        box = Sandbox.model_validate_json(given[Env.SANDBOX])
        assert str(own) in box.own_write
        assert "/big" in box.read
    finally:
        await house.world.stop_workers(0.0)


async def test_a_killed_worker_is_seen_dead_with_what_is_known(house: House) -> None:
    await house.create(0)
    (house.key().folder(house.world.state) / "log").write_text("token hunter2-hunter2 refused\n")
    psutil.Process(house.pid()).kill()
    processes_gone(house)
    worker = await house.worker()
    assert worker.exit is not None
    assert (worker.state, worker.reason, worker.exit.exit_code, worker.exit.signal, worker.exit.log_tail) == (
        WorkerState.EXITED,
        "ProcessLost",
        137,
        9,
        "token *** refused\n",
    )
    again = await house.worker(fresh=True)
    assert again.exit == worker.exit, "the same for whoever looks later"


async def test_a_worker_that_says_how_it_ended_is_believed(house: House) -> None:
    await house.create(0)
    ended = WorkerExit(exit_code=82, at=12.5, rank=0, message="loss is nan")
    processes.write_whole(house.key().folder(house.world.state) / "exit.json", dump_json(ended))
    worker = await house.worker()
    assert (worker.state, worker.exit, worker.reason, worker.since) == (WorkerState.EXITED, ended, "", 12.5)


async def test_a_garbled_exit_record_of_a_dead_worker_is_no_record(house: House) -> None:
    await house.create(0)
    psutil.Process(house.pid()).kill()
    processes_gone(house)
    (house.key().folder(house.world.state) / "exit.json").write_bytes(b'{"exitCode": ')
    worker = await house.worker()
    assert worker.exit is not None
    assert (worker.state, worker.exit.exit_code) == (WorkerState.EXITED, 137)


async def test_a_fresh_look_finds_what_no_folder_tells(house: House) -> None:
    """The record and the whole folder are gone; the process is not."""
    await house.create(0)
    pid = house.pid()
    folder = house.key().folder(house.world.state)
    (folder / processes.RECORD).unlink()
    folder.rename(folder.with_name("hidden"))
    assert (await house.observe()).workers == ()
    folder.mkdir()
    worker = await house.worker(fresh=True)
    assert (worker.state, worker.node, house.pid()) == (WorkerState.RUNNING, "local-0", pid)


async def test_a_worker_is_starting_from_the_moment_it_is_claimed(house: House) -> None:
    folder = house.key().folder(house.world.state)
    folder.mkdir(parents=True)
    (folder / processes.CLAIM).touch()
    assert (await house.observe(fresh=True)).workers == ()
    holder = os.open(folder / processes.CLAIM, os.O_RDWR)
    assert processes._lock(holder)
    assert (await house.worker(fresh=True)).state == WorkerState.STARTING
    os.close(holder)


async def test_a_new_operator_adopts_what_runs_and_ends_what_belongs_to_nobody(house: House) -> None:
    await house.create(0)
    stray = processes.start(
        house.world.state,
        WorkerKey("no-such-job", 3, 0),
        "local-2",
        SLEEP,
        dict(os.environ) | processes.marks(house.world.state, WorkerKey("no-such-job", 3, 0)),
    )
    assert stray is not None
    second = LocalWorld(house.world.state.root, VirtualNodes(4), SLEEP, JobSpec)
    adopted, strays = await second.adopt()
    assert [record.key for record in adopted] == [house.key()]
    assert strays == (WorkerKey("no-such-job", 3, 0),)
    await second._removals.finish()
    assert [member.key for member in processes.scan(house.world.state)] == [house.key()]


async def test_news_comes_of_jobs_deaths_and_phases_but_not_of_steps(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    news: asyncio.Queue[str] = asyncio.Queue()
    polls, poll = [0], house.world._watch._poll

    def counted() -> set[str]:
        found = poll()
        polls[0] += 1
        return found

    monkeypatch.setattr(house.world._watch, "_poll", counted)

    async def listen() -> None:
        async for uid in house.world.watch():
            news.put_nowait(uid)

    async def heard() -> None:
        """Wait for news, and then for a silence of several polls."""
        assert await asyncio.wait_for(news.get(), WAIT_SECONDS_MAX) == house.uid
        while not await silent():
            pass

    async def silent() -> bool:
        enough = polls[0] + 4  # the first has begun already, and what the last finds is not told yet
        await asyncio.to_thread(eventually, lambda: not news.empty() or polls[0] >= enough, "news, or polls without")
        if news.empty():
            return True
        assert news.get_nowait() == house.uid
        return False

    def beat(phase: str, step: int, **other: Any) -> None:
        facts = {
            "attempt": 1, "rank": 0, "pid": 1, "phase": phase, "step": step, "at": 1.0, "progressedAt": 1.0,
            "startedAt": 1.0,
        } | other  # fmt: skip
        processes.write_whole(house.key().folder(house.world.state) / "rank-0.json", json.dumps(facts))

    listening = asyncio.create_task(listen())
    await heard()  # of each job that there is
    await house.create(0)
    await heard()
    beat("init", 0)
    await heard()
    beat("step", 1)
    await heard()
    beat("step", 2)
    assert await silent()
    beat("step", 3, lastCommitStep=3)
    await heard()
    psutil.Process(house.pid()).kill()
    assert await asyncio.wait_for(news.get(), WAIT_SECONDS_MAX) == house.uid
    listening.cancel()


async def test_reservations_are_compared_and_swapped_and_outlive_the_operator(house: House) -> None:
    entry = NodeReservation(house.uid, 1, "default", NODES, "local", "on-demand", at=3.0)
    empty = await house.world.reservations()
    await house.world.write_reservations((entry,), empty.version)
    with pytest.raises(VersionConflict):
        await house.world.write_reservations((), empty.version)
    later = LocalWorld(house.world.state.root, VirtualNodes(4), SLEEP, JobSpec)
    assert (await later.reservations()).entries == (entry,)
    seen = await later.observe(house.uid)
    assert seen is not None
    assert seen.reservations == (entry,)
    (house.world.state.root / "reservations.json").write_text("{")
    with pytest.raises(UnreadableDocument, match=r"reservations.json can't be understood"):
        await LocalWorld(house.world.state.root, VirtualNodes(4), SLEEP, JobSpec).reservations()


async def test_the_fleet_has_the_quotas_that_are_written_and_whose_each_job_is(house: House) -> None:
    cluster, labels = house.world.cluster, {"muster.dev/project": "nlp", "muster.dev/owner": "ada"}
    cluster.create("other", "default", house.job.spec, labels)
    cluster.write_quota("nlp", ProjectQuota(gpus=8, person=Quota(gangs=1)))
    fleet = await house.world.fleet()
    assert fleet.quotas == {"nlp": ProjectQuota(gpus=8, person=Quota(gangs=1))}
    assert [(job.project, job.owner) for job in fleet.jobs] == [("default", ""), ("nlp", "ada")]
    cluster.write_quota("nlp", ProjectQuota(gpus=4))
    assert (await house.world.fleet()).quotas == {"nlp": ProjectQuota(gpus=4)}
    cluster.write_quota("nlp", None)
    assert (await house.world.fleet()).quotas == {}


async def test_the_fleet_follows_what_is_written(house: House) -> None:
    fleet = await house.world.fleet()
    assert [(node.name, node.slots, node.gpus, node.ready) for node in fleet.nodes] == [
        (f"local-{index}", 1, 0, True) for index in range(4)
    ]
    assert [(job.name, job.status.attempt) for job in fleet.jobs] == [("tiny", 1)]
    other = house.world.cluster.create("other", "default", house.job.spec, {}).metadata.uid
    house.set_attempt(2)
    assert {job.name: job.status.attempt for job in (await house.world.fleet()).jobs} == {"tiny": 2, "other": 0}
    await house.world.apply(other, RemoveJob())
    assert [job.name for job in (await house.world.fleet()).jobs] == ["tiny"]
    assert house.world.phases() == {Phase.STARTING: 1}
    assert await house.world.jobs() == (house.uid,)
    assert await house.world.observe(other) is None


async def test_a_job_that_a_newer_muster_wrote_is_left_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.world.fleet()
    broken = house.job.status.model_dump(mode="json") | {"phase": "Hovering"}
    monkeypatch.setattr("muster.local.cluster.dump_json", lambda status: json.dumps(broken))
    house.world.cluster.write_status(house.uid, JobStatus(), house.job.metadata.resource_version)
    with pytest.raises(UnreadableDocument, match="written by a newer Muster"):
        await house.world.observe(house.uid)
    assert [job.name for job in (await house.world.fleet()).jobs] == ["tiny"]


async def test_a_job_whose_spec_can_not_be_read_ends_and_says_why(house: House) -> None:
    """It stayed in the queue without a word, and its removal was never done."""
    uid = house.world.cluster.create("broken", "default", house.job.spec, {}).metadata.uid
    with contextlib.closing(sqlite3.connect(house.world.state.cluster)) as db:
        document = json.loads(db.execute("SELECT spec FROM jobs WHERE uid = ?", (uid,)).fetchone()[0])
        document["gang"]["nodes"] = "four"
        db.execute("UPDATE jobs SET spec = ? WHERE uid = ?", (json.dumps(document), uid))
        db.commit()
    assert await house.world.observe(uid) is None
    status = JobStatus.model_validate_json(house.world.cluster.raw(uid).status)
    assert (status.phase, status.code) == (Phase.FAILED, "InvalidSpec")
    assert status.because.startswith("the spec was refused: spec.gang.nodes:")
    version = house.world.cluster.version()
    assert await house.world.observe(uid) is None
    assert house.world.cluster.version() == version, "said once"
    house.world.cluster.delete(uid)
    assert await house.world.observe(uid) is None
    assert uid not in await house.world.jobs()


async def test_a_node_that_this_start_does_not_have_is_unfit(house: House) -> None:
    smaller = LocalWorld(house.world.state.root, VirtualNodes(1), SLEEP, JobSpec)
    seen = await smaller.observe(house.uid)
    assert seen is not None
    assert seen.nodes_unfit == ("local-1",)


async def test_a_guest_writes_nothing(house: House) -> None:
    await house.create(0)
    psutil.Process(house.pid()).kill()
    processes_gone(house)
    guest = LocalWorld(house.world.state.root, VirtualNodes(4), (), JobSpec, reads_only=True)
    seen = await guest.observe(house.uid, fresh=True)
    assert seen is not None
    assert seen.workers[0].state == WorkerState.EXITED
    assert not (house.key().folder(house.world.state) / "exit.json").exists()


async def test_a_death_by_a_foreign_hand_speaks_against_no_node(house: House) -> None:
    await house.create(0)
    await house.create(1)
    psutil.Process(house.pid()).kill()
    end = WorkerExit(exit_code=152, signal=24, at=1.0, message="rank 0 was killed by SIGXCPU", unexplained=True)
    (house.key(1).folder(house.world.state) / "exit.json").write_text(dump_json(end))
    processes_gone(house)
    seen = await house.world.observe(house.uid, fresh=True)
    assert seen is not None
    assert [worker.node_blameless for worker in seen.workers] == [True, True]
    await house.world.stop_workers(0.0)


async def test_gpus_are_shared_out_and_never_twice(tmp_path: Path) -> None:
    house = House(tmp_path, gpus_per_node=4, gpusPerNode=2, nodes=1)
    for worker in (0, 1):
        await house.create(worker, node="local-1")
    assert [house.environment(worker)["CUDA_VISIBLE_DEVICES"] for worker in (0, 1)] == ["4,5", "6,7"]
    assert [house.environment(worker)[Env.DEVICE] for worker in (0, 1)] == ["cuda", "cuda"], "never the CPU instead"
    with pytest.raises(OSError, match="local-1 has 0 free GPUs, 2 are needed"):
        await house.world.apply(house.uid, CreateWorker(WorkerId(1, 2), "local-1", ("local-1",) * 3, 0))
    await house.world.stop_workers(0.0)


async def test_pretended_gpus_train_on_the_cpu_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.PRETEND_GPUS, "1")
    house = House(tmp_path, gpus_per_node=4, gpusPerNode=2, nodes=1)
    await house.create(0)
    assert house.environment(0)[Env.DEVICE] == "cpu"
    seen = await house.world.observe(house.uid)
    assert seen is not None
    assert seen.notes == ("its GPUs are pretended (MUSTER_PRETEND_GPUS), so it trains on the CPU",)
    await house.world.stop_workers(0.0)


async def test_what_means_nothing_here_is_said_in_the_workers_log(house: House) -> None:
    spec = house.job.spec.model_copy(update={"runtime": Runtime(image="trainer:1", env_from=({"secretRef": {}},))})
    house.world.cluster.write_spec(house.uid, spec)
    await house.create(0)
    log = (house.key().folder(house.world.state) / "log").read_text()
    assert log == "muster: runtime.image, runtime.envFrom mean nothing on this machine: ignored\n"


async def test_a_cpu_worker_sees_no_gpu(house: House) -> None:
    await house.create(0)
    assert house.environment()["CUDA_VISIBLE_DEVICES"] == ""


async def test_one_port_per_attempt_and_none_that_is_taken(house: House) -> None:
    state = house.world.state
    first = rendezvous_port(state, house.uid, 1)
    assert rendezvous_port(state, house.uid, 1) == first
    wanted = next(free_ports(f"{house.uid}/2"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", wanted))
        other.listen()
        assert rendezvous_port(state, house.uid, 2) not in (first, wanted)


async def test_a_disk_that_is_full_starts_nothing_and_later_all(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(processes, "write_whole", full)
    monkeypatch.setattr("muster.operator.local.nodes.write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        await house.create(0)
    assert processes.scan(house.world.state) == ()
    monkeypatch.undo()
    await house.create(0)
    assert (await house.worker()).state == WorkerState.RUNNING


def processes_gone(house: House) -> None:
    record = processes.read_record(house.world.state, house.key())
    assert record is not None
    eventually(lambda: not processes.alive(house.world.state, record), "the worker's death")
