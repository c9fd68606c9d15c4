"""Ranks on demand: imports torch once and forks each gang, so that hundreds of lives cost seconds, not minutes.

Reads one order per line (JSON) on standard input and answers each with the exit codes of its ranks. What the ranks
have to say is in `<meeting>/notes-<rank>.jsonl`.
"""

import ctypes
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.integration.checkpoint import gang

SHARD = "fsdp"
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1


def main() -> int:
    """What a rank needs is imported here, once: a life must not begin with a second of reading modules."""
    import boto3.session  # noqa: F401
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    import muster.storage.s3_store
    import muster.trainer.checkpoint.loader
    import muster.trainer.checkpoint.saver  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_life(json.loads(line))), flush=True)
    return 0


def _life(order: dict[str, Any]) -> list[int]:
    """Fork the ranks and wait for all; as a launcher does, kill the rest when one fails."""
    world = order["world"]
    children: dict[int, int] = {}
    for rank in range(world):
        if (pid := os.fork()) == 0:
            _be_rank(rank, order)
        children[pid] = rank
    codes = [0] * world
    left = set(children)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        codes[children[pid]] = os.waitstatus_to_exitcode(status)
        if codes[children[pid]] != 0:
            for other in left:
                os.kill(other, 9)
    return codes


def _be_rank(rank: int, order: dict[str, Any]) -> None:
    code = 1
    try:
        log = os.open(f"{order['meeting']}/log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order.get("environment", {}))
        if order.get("obeys_modes"):  # as whoever is not root, its upload process too
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)
        if "file_bytes_max" in order:  # a disk that fills up, for this rank and its upload process
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes_max"], order["file_bytes_max"]))
        code = _live(rank, order)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _live(rank: int, order: dict[str, Any]) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if order["world"] > 1:
        store = dist.FileStore(f"{order['meeting']}/store", order["world"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=order["world"])
    path = Path(order["meeting"], f"notes-{rank}.jsonl")

    def note(**what: Any) -> None:
        with path.open("a") as notes:
            print(json.dumps(what), file=notes)

    does = {"train": _train, "check": _check, "dcp_train": _dcp_train, "dcp_check": _dcp_check}
    return does[order["do"]](order, note)


def _train(order: dict[str, Any], note: Any) -> int:
    """Resume, then train and save; every claim is noted as it is made."""
    from muster.trainer.checkpoint import CheckpointSaver, TrainState, resume
    from muster.trainer.errors import StorageError
    from muster.words.job import Keep
    from muster.worker.fence import StaleAttempt

    model, optimizer = gang.build(SHARD if order["world"] > 1 else "none", seed=0)
    start = 0
    if order.get("resume"):
        try:
            start = resume(order["folder"], order["resume"], model, optimizer, lambda words: note(report=words)).step
        except StorageError as error:
            note(not_resumed=str(error))
            return 83
        note(resumed=start, digest=gang.digest(model, optimizer))
    saver = CheckpointSaver(gang.identity(order), Keep(last=3), {})
    note(uploader=saver._process.pid)
    try:
        for step in range(start + 1, start + 1 + order["steps"]):
            gang.step_once(model, optimizer, step)
            state = TrainState(model, optimizer, step, 0, _cursor(step), {}, {}, {}, best=False)
            note(saving=step, pid=os.getpid())
            saver.save(state, emergency=True)
            for outcome in saver.finished():
                note(outcome=outcome.step, committed=outcome.committed, error=outcome.error)
        for outcome in saver.drain(60):
            note(outcome=outcome.step, committed=outcome.committed, error=outcome.error)
    except StaleAttempt as stale:
        note(stale=str(stale))
        return 87
    finally:
        saver.close()
    return 0


def _check(order: dict[str, Any], note: Any) -> int:
    """Load each commit of the list; fall_back: then resume from the last of them. Says what came of each, and whether
    a failure left everything as it was."""
    from muster.trainer.checkpoint import load, resume
    from muster.trainer.errors import StorageError

    tries: list[tuple[str, int]] = [("step", step) for step in order["steps"]]
    if order.get("fall_back"):
        tries.append(("fallen", order["steps"][-1]))
    for word, step in tries:
        note(checking=step)
        model, optimizer = gang.build(SHARD if order["world"] > 1 else "none", seed=1)
        before, began = gang.digest(model, optimizer), time.monotonic()
        try:
            if word == "fallen":
                step = resume(order["folder"], step, model, optimizer, lambda words: note(report=words)).step
            else:
                load(order["folder"], step, model, optimizer)
            seconds = time.monotonic() - began
            note(**{word: step}, digest=gang.digest(model, optimizer), seconds=seconds)
        except StorageError as error:
            note(**{word: step}, error=str(error), untouched=gang.digest(model, optimizer) == before)
    return 0


def _dcp_train(order: dict[str, Any], note: Any) -> int:
    """The same life with torch.distributed.checkpoint: its asynchronous save, several writer threads, one folder a
    step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = gang.build("none", seed=0)
    for step in range(1, 1 + order["steps"]):
        gang.step_once(model, optimizer, step)
        note(saving=step, pid=os.getpid())
        weights, states = get_state_dict(model, optimizer)
        writer = dcp.FileSystemWriter(f"{order['folder']}/step-{step}", thread_count=2)
        try:
            dcp.async_save({"model": weights, "optimizer": states}, storage_writer=writer, no_dist=True).result()
            note(outcome=step, committed=True, error=None)
        except Exception as error:
            note(outcome=step, committed=False, error=str(error)[:200])
    return 0


def _dcp_check(order: dict[str, Any], note: Any) -> int:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    for step in order["steps"]:
        model, optimizer = gang.build("none", seed=1)
        before = gang.digest(model, optimizer)
        try:
            weights, states = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": states}
            dcp.load(state, storage_reader=dcp.FileSystemReader(f"{order['folder']}/step-{step}"), no_dist=True)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            note(step=step, digest=gang.digest(model, optimizer))
        except BaseException as error:
            # get_state_dict initialised the optimizer, so only the weights tell whether the load had begun.
            after = gang.digest(model, optimizer)
            untouched = all(after[name] == bits for name, bits in before.items())
            note(step=step, error=f"{type(error).__name__}: {error}"[:200], untouched=untouched)
    return 0


def _cursor(step: int) -> Any:
    from muster.words.checkpoint import DataCursor

    return DataCursor(seed=0, epoch=0, sample=step)


if __name__ == "__main__":
    sys.exit(main())
