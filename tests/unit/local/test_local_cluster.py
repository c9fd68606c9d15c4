"""The local cluster keeps the Kubernetes API's habits: compare-and-swap, generations, marked deletion, history."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from muster.api.core.cluster.cluster import ApplyOutcome, DesiredJob, LocalJobCluster
from muster.local.cluster import AlreadyExists, LocalCluster, NotFound, VersionConflict
from muster.recipe.document import JobSpec, parse_job
from muster.words.status import Phase

DOCUMENT = {
    "metadata": {"name": "tiny"},
    "spec": {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "x.txt"}]},
            "batch": {"tokensPerStep": 512},
            "length": {"steps": 1},
        }
    },
}


@pytest.fixture
def spec() -> JobSpec:
    return parse_job(DOCUMENT).spec


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    return LocalCluster(tmp_path / "cluster.db", JobSpec)


def test_status_is_written_by_compare_and_swap(cluster: LocalCluster, spec: JobSpec) -> None:
    job = cluster.create("a", "default", spec, {"team": "nlp"})
    running = job.status.model_copy(update={"phase": Phase.RUNNING, "attempt": 1})
    cluster.write_status(job.metadata.uid, running, job.metadata.resource_version)
    with pytest.raises(VersionConflict):
        cluster.write_status(job.metadata.uid, job.status, job.metadata.resource_version)
    seen = cluster.get(job.metadata.uid)
    assert (seen.status, seen.spec, seen.metadata.labels) == (running, spec, {"team": "nlp"})


def test_a_database_of_the_release_before_is_read(cluster: LocalCluster, spec: JobSpec) -> None:
    """It wrote times as numbers."""
    uid = cluster.create("a", "default", spec, {}).metadata.uid
    old = {"schemaVersion": 1, "phase": "Running", "since": 1795418698.1234567, "ledger": {"since": 1795418698}}
    with sqlite3.connect(cluster.path) as db:
        db.execute("UPDATE jobs SET status = ?", (json.dumps(old),))
    job = cluster.get(uid)
    assert (job.status.since, job.status.ledger.since) == (1795418698.1234567, 1795418698.0)
    cluster.write_status(uid, job.status, job.metadata.resource_version)
    with sqlite3.connect(cluster.path) as db:
        (text,) = db.execute("SELECT status FROM jobs").fetchone()
    assert json.loads(text)["since"] == "2026-11-23T07:24:58.1234567Z"
    assert cluster.get(uid).status == job.status


def test_spec_writes_move_the_generation_only_when_something_changed(cluster: LocalCluster, spec: JobSpec) -> None:
    job = cluster.create("a", "default", spec, {})
    cluster.write_spec(job.metadata.uid, spec)
    assert cluster.get(job.metadata.uid).metadata.generation == 1
    cluster.write_spec(job.metadata.uid, spec.model_copy(update={"suspend": True}))
    assert cluster.get(job.metadata.uid).metadata.generation == 2
    with pytest.raises(VersionConflict):
        cluster.write_spec(job.metadata.uid, spec, job.metadata.resource_version)


def test_a_repeated_create_is_recognised(cluster: LocalCluster, spec: JobSpec) -> None:
    cluster.create("a", "default", spec, {}, uid="u-1")
    with pytest.raises(AlreadyExists) as taken:
        cluster.create("a", "default", spec, {}, uid="u-1")
    assert taken.value.uid == "u-1"
    with pytest.raises(AlreadyExists):
        cluster.create("a", "default", spec, {}, uid="u-2")
    assert cluster.create("a", "elsewhere", spec, {}).metadata.namespace == "elsewhere"


def test_what_is_written_together_is_there_together_but_for_what_is_refused(
    cluster: LocalCluster, spec: JobSpec
) -> None:
    def names() -> list[str]:
        return [job.metadata.name for job in cluster.jobs()]

    with cluster.together():
        first = cluster.create("a", "default", spec, {})
        with pytest.raises(AlreadyExists):
            cluster.create("a", "default", spec, {})
        with pytest.raises(VersionConflict):
            cluster.write_status(first.metadata.uid, first.status, "99")
        cluster.create("b", "default", spec, {})
        seen: list[list[str]] = []
        other = threading.Thread(target=lambda: seen.append(names()))
        other.start()
        other.join()
    assert (seen, names()) == ([[]], ["a", "b"])
    with pytest.raises(AlreadyExists), cluster.together():
        [cluster.create(name, "default", spec, {}) for name in ("c", "a")]
    assert names() == ["a", "b"]


def test_a_disk_that_is_full_in_the_middle_of_a_hand_over_has_all_of_it_repeated(
    cluster: LocalCluster, spec: JobSpec
) -> None:
    desired = [DesiredJob(f"uid-{n}", f"job-{n}", "default", {}, spec, seen=False) for n in range(40)]
    carrier, disk = LocalJobCluster(cluster), cluster._connection()
    pages = disk.execute("PRAGMA page_count").fetchone()[0]
    disk.execute(f"PRAGMA max_page_count={pages + 8}")
    results = carrier._apply_all(desired)
    assert {(result.outcome, result.error) for result in results} == {
        (ApplyOutcome.RETRY, "OperationalError: database or disk is full")
    }
    assert cluster.jobs() == []
    disk.execute("PRAGMA max_page_count=1000000")
    assert {result.outcome for result in carrier._apply_all(desired)} == {ApplyOutcome.DONE}
    assert sorted(job.metadata.uid for job in cluster.jobs()) == sorted(job.uid for job in desired)


def test_deletion_marks_first_and_history_outlives_removal(cluster: LocalCluster, spec: JobSpec) -> None:
    job = cluster.create("a", "default", spec, {})
    cluster.delete(job.metadata.uid)
    marked = cluster.get(job.metadata.uid).metadata.deletion_timestamp
    cluster.delete(job.metadata.uid)
    assert marked
    assert cluster.get(job.metadata.uid).metadata.deletion_timestamp == marked
    cluster.remove(job.metadata.uid)
    cluster.remove(job.metadata.uid)
    with pytest.raises(NotFound):
        cluster.get(job.metadata.uid)
    assert [change.gone for change in cluster.changes(0)] == [False, True]


def test_list_after_a_version_tells_what_is_new(cluster: LocalCluster, spec: JobSpec) -> None:
    first = cluster.create("a", "default", spec, {})
    seen = cluster.version()
    assert cluster.jobs(seen) == []
    second = cluster.create("b", "default", spec, {})
    assert [job.metadata.name for job in cluster.jobs(seen)] == ["b"]
    cluster.write_status(first.metadata.uid, first.status, first.metadata.resource_version)
    assert [job.metadata.name for job in cluster.jobs(seen)] == ["b", "a"]
    assert second.metadata.uid != first.metadata.uid


def test_of_many_writers_at_one_version_one_wins(cluster: LocalCluster, spec: JobSpec) -> None:
    job = cluster.create("a", "default", spec, {})
    outcomes: list[str] = []

    def write(attempt: int) -> None:
        try:
            cluster.write_status(
                job.metadata.uid, job.status.model_copy(update={"attempt": attempt}), job.metadata.resource_version
            )
            outcomes.append(f"won {attempt}")
        except VersionConflict:
            outcomes.append("lost")

    threads = [threading.Thread(target=write, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("lost") == 7
    assert f"won {cluster.get(job.metadata.uid).status.attempt}" in outcomes


def test_a_second_cluster_in_a_process_ends_no_locks_of_the_first(cluster: LocalCluster, spec: JobSpec) -> None:
    """Without its locks, the first one's journal is removed by the next process that closes the file as its last user,
    and what the first one commits afterwards is in no file that others read."""
    cluster.create("before", "default", spec, {})
    LocalCluster(cluster.path)
    _in_another_process(cluster.path)
    cluster.create("after", "default", spec, {})
    assert _in_another_process(cluster.path) == ["before", "after"]


def _in_another_process(path: Path) -> list[str]:
    code = (
        "import json, sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1])\n"
        "print(json.dumps([name for (name,) in db.execute('SELECT name FROM jobs ORDER BY version')]))\n"
        "db.close()"
    )
    reply = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(reply.stdout)
    return names
