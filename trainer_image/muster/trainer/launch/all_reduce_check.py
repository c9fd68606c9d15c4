"""A small all-reduce over the whole gang before it trains: over NCCL, and so EFA, where there are GPUs, else over gloo.

One process per rank, as in training; each ends with 0, or says why not. A way between nodes that is broken or slow is
found in seconds here; in training it would be a hang.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta

from muster.words.names import Env, Rendezvous

# Beside torchrun's own port, which the gang will need in a moment.
PORT_OFFSET = 2
# Nodes come up one by one, each pulling its image; who does not come is not this check's affair.
MEETING_SECONDS = 600.0
REDUCE_SECONDS = 60.0
ELEMENTS = 4 * 2**20  # 16 MiB of float32: enough for NCCL to use every way that it has
ABSENT = 3  # exit code: the others did not come


def check_all_reduce() -> str | None:
    """Return why the gang can't add numbers up together; None if it can, or if it has only one worker."""
    nodes, per_node = int(os.environ.get(Rendezvous.NODES, "1")), int(os.environ.get(Rendezvous.RANKS_PER_NODE, "1"))
    if nodes < 2:
        return None
    first = int(os.environ.get(Rendezvous.NODE_RANK, "0")) * per_node
    began = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "muster.trainer.launch.all_reduce_check",
             str(first + local), str(nodes * per_node), str(MEETING_SECONDS)],
            stderr=subprocess.PIPE, text=True,
        )
        for local in range(per_node)
    ]  # fmt: skip
    problems = []
    for number, process in enumerate(ranks):
        left = began + MEETING_SECONDS + 2 * REDUCE_SECONDS - time.monotonic()
        try:
            _, words = process.communicate(timeout=max(1.0, left))
        except subprocess.TimeoutExpired:  # NCCL may hang where no exception reaches
            process.kill()
            problems.append(f"rank {first + number} hung")
            continue
        if process.returncode == ABSENT:
            print("preflight: collective: not all of the gang came in time; not looked at", file=sys.stderr)
        elif process.returncode:
            problems.append(f"rank {first + number}: {(words.strip().splitlines() or ['no word'])[-1][:300]}")
    return "; ".join(problems[:2]) or None


def reduce(rank: int, world: int, meeting_seconds: float) -> int:
    """Play one rank's part in the check, and return its exit code. `meeting_seconds` is how long it waits for the
    others.
    """
    import torch
    from torch import distributed as dist
    from torch._C._distributed_c10d import TCPStore

    gpus = os.environ.get(Env.DEVICE) != "cpu" and torch.cuda.is_available()
    host, port = os.environ[Rendezvous.HOST], int(os.environ[Rendezvous.PORT]) + PORT_OFFSET
    try:
        store = TCPStore(host, port, world, rank == 0, timedelta(seconds=meeting_seconds))
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return ABSENT
    store.set_timeout(timedelta(seconds=REDUCE_SECONDS))
    if gpus:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=REDUCE_SECONDS)
    )
    numbers = torch.ones(ELEMENTS if gpus else 1024, device=device)
    began = time.monotonic()
    dist.all_reduce(numbers)
    total = numbers[-1].item()
    if rank == 0:
        print(f"preflight: {world} ranks added up over {backend} in {time.monotonic() - began:.2f} s", flush=True)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world:  # who keeps the store goes last
        time.sleep(0.01)
    if total != world:
        print(f"the sum over {world} ranks is {total}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = reduce(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not by tearing NCCL down, which may hang when another rank has gone
