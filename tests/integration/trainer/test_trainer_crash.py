"""A crash loses one step at most: what dead ranks left in memory is committed, whichever of them died first."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.integration.trainer.gangs import Job, training, write_corpus
from tests.polling import eventually
from tests.processes import environment_of, others

from muster.words.names import Env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def of_job(job: Job) -> list[psutil.Process]:
    """Every process that carries the job's mark: launchers, ranks, upload processes."""
    mark = f"{job.root}/"
    return [each for each in others() if environment_of(each).get(Env.WORKER_DIR, "").startswith(mark)]


@pytest.mark.long
def test_rank_0_dies_then_a_whole_worker(tmp_path: Path) -> None:
    document = training(
        write_corpus(tmp_path / "corpus"),
        batch={"tokensPerStep": 512, "microBatch": 1},
        length={"steps": 2000},
        parallel={"shard": "zero2"},
    )
    job = Job(tmp_path / "job", document, {"every": 1000})
    gang = job.start(attempt=1, workers=2)
    beat = gang.reaches(12)
    os.kill(beat.pid, signal.SIGKILL)
    killed, _ = gang.ends()
    assert (killed.rank, killed.signal) == (0, signal.SIGKILL)
    (step,) = job.commits()
    assert step >= job.steps(1)[-1].step - 1 >= beat.step - 1, gang.log()
    assert job.commit(step)["attempt"] == 1

    # Its memory goes with the worker, so all that is left is the commit; the others see that, and end.
    gang = job.start(attempt=2, resume_step=step, workers=2)
    gang.reaches(step + 5)
    gang.launchers[1].kill()
    gang.ends()
    assert job.commits() == [step], gang.log()
    eventually(lambda: not of_job(job), "no process is left")
