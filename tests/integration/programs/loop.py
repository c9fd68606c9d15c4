"""Ranks of a program's own loop that saves by `run.save`: one process imports torch, then forks the ranks of one run
after another, as a launcher would start them.

python -m tests.integration.programs.loop '[{"world": 2, "shard": "ddp", …}, …]'
"""

import atexit
import hashlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.polling import eventually

ROOT = Path(__file__).parents[3]


def run_loops(folder: Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of rank 0 of each run; none where it was killed."""
    for number, order in enumerate(runs):
        order |= {"worker_dir": str(folder / f"run-{number}")}
        Path(order["worker_dir"]).mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.programs.loop", json.dumps(runs)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = [Path(order["worker_dir"], "said.json") for order in runs]
    return [json.loads(path.read_text()) if path.exists() else {} for path in said]


def main() -> int:
    import torch.distributed.fsdp  # noqa: F401  (before the fork, so that it costs once)

    import muster.trainer.programs.loop_saver  # noqa: F401
    from muster.trainer.checkpoint import coordinator, uploader
    from muster.trainer.launch.process_control import LAUNCHER
    from muster.worker.process_tree import adopt_orphans

    # The upload processes, which are forked too, wait for each other however long a busy machine stands still.
    vars(uploader).update(AFTER_CRASH_SECONDS_MAX=600.0, OTHERS_SECONDS_MAX=600.0)
    vars(coordinator).update(OTHERS_SECONDS_MAX=600.0)
    adopt_orphans()
    os.environ[LAUNCHER] = str(os.getpid())
    for order in json.loads(sys.argv[1]):
        ranks = {_fork(rank, order): rank for rank in range(order["world"])}
        while True:  # until all are gone, and the processes that outlive them
            try:
                pid, status = os.wait()
            except ChildProcessError:
                break
            if ranks.pop(pid, None) is None or os.waitstatus_to_exitcode(status) == 0:
                continue
            if "kill" not in order:
                return 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return 0


def _fork(rank: int, order: dict[str, Any]) -> int:
    from muster.trainer.checkpoint.upload_process import fork_while_young

    if (pid := os.fork()) != 0:
        return pid
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(order["world"]),
            "MUSTER_WORKER_DIR": order["worker_dir"], "MUSTER_CHECKPOINT_DIR": f"{order['worker_dir']}/checkpoints",
        }  # fmt: skip
        if "resume" in order:
            os.environ["MUSTER_RESUME_DIR"] = order["resume"]
        fork_while_young(Path(order["worker_dir"], "checkpoints").as_uri())
        _rank(rank, order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


def _rank(rank: int, order: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from muster import run

    torch.set_num_threads(1)
    world, folder = order["world"], Path(order["worker_dir"])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(rank if "resume" in order else 0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.25), nn.Linear(10, 3))
    net: nn.Module = model
    if order["shard"] == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    seen = {"samples": 0}
    step = begun = run.load(net, optimizer, schedule=schedule, seen=seen)
    kill = order.get("kill")
    while step < order["steps"]:
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        schedule.step()
        step += 1
        seen["samples"] += 4
        run.step(step, steps=order["steps"])
        run.save(step, net, optimizer, every=order["every"], schedule=schedule, seen=seen)
        if step == kill:
            _die_when_all_have_saved(rank, world, folder)
    if "resave" in order:
        run.save(step, net, optimizer, schedule=schedule, seen=seen)
    said = {
        "begun": begun, "step": step, "samples": seen["samples"], "digest": digest(model, optimizer),
        "rates": [group["lr"] for group in optimizer.param_groups],
    }  # fmt: skip
    if rank == 0:
        (folder / "said.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def _die_when_all_have_saved(rank: int, world: int, folder: Path) -> None:
    (folder / f"saved-{rank}").touch()
    marks = ("saved-*", "rank-*.saver.json")
    eventually(lambda: all(len([*folder.glob(mark)]) == world for mark in marks), "all ranks to have saved", 600)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def digest(model: Any, optimizer: Any) -> str:
    """SHA-256 of whole weights and optimizer state, whatever shards them."""
    held = [tensor for _, tensor in sorted(model.state_dict().items())]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held += [tensor for _, tensor in sorted(optimizer.state[parameter].items())]
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in held]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in whole)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
