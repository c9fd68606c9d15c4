"""Own `sitecustomize` of the drill's program: it notes each step, and does to its rank what it is ordered to.

Muster's hook, which hides it, has to run it in its place; plain torchrun finds it by PYTHONPATH. A rank appends
`<pid> <step> <seconds since the epoch>` to `<DRILL_ORDERS>/<run>/steps-<rank>` after each step, and obeys the order
`rank-<rank>.json` there once (the file is renamed first, so that a restarted rank is healthy).
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time

TARGET = "torch.optim.optimizer"
# A step of the example takes a few milliseconds: too short to be struck in the middle of a run.
STEP_SECONDS = float(os.environ.get("DRILL_STEP_SECONDS", "0.05"))
FILE_BYTES_MAX = 64 << 10  # a report fits in it, a checkpoint does not
DAEMON = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in main\n    loss.backward()\n'
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:2356, remote process exited or there was a network error, NCCL version 2.27\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)


class Rank:
    def __init__(self, folder, rank):
        self.order, self.done = os.path.join(folder, f"rank-{rank}.json"), os.path.join(folder, f"rank-{rank}.done")
        self.steps = os.open(os.path.join(folder, f"steps-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def stepped(self, optimizer, args, kwargs):
        step = int(next(iter(optimizer.state.values()))["step"])
        os.write(self.steps, f"{os.getpid()} {step} {time.time()}\n".encode())
        time.sleep(STEP_SECONDS)  # not a wait: a step takes so long
        if os.path.exists(self.order):
            with open(self.order) as file:
                order = json.load(file)
            os.remove(self.order)
            with open(f"{self.done}.part", "w") as file:
                file.write(str(time.time()))
            os.replace(f"{self.done}.part", self.done)
            getattr(self, order["kind"])(optimizer, **order["details"])

    def end(self, optimizer, code):
        os._exit(code)

    def end_without_outputs(self, optimizer):
        os.close(1)
        os.close(2)
        os._exit(5)

    def fail(self, optimizer):
        raise RuntimeError("the drill's bug, this once")

    def fail_with_a_daemon(self, optimizer):
        subprocess.Popen([sys.executable, "-S", "-c", DAEMON], start_new_session=True)
        raise RuntimeError("the drill's bug, beside a daemon")

    def fail_in_nccl(self, optimizer):
        import torch.distributed as dist

        raise dist.DistBackendError(NCCL)

    def swallow_nccl_error(self, optimizer):
        sys.stderr.write(f"{TRACEBACK}torch.distributed.DistBackendError: {NCCL}\n")
        sys.stderr.flush()
        os._exit(0)

    def hang_in_backward(self, optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.register_hook(stand)

    def stay_away(self, optimizer):
        stand()

    def ignore_sigterm(self, optimizer):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def change_directory(self, optimizer):
        os.chdir("/proc")  # where nobody can save

    def fill_disk(self, optimizer):
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))

    def exhaust_memory(self, optimizer):
        import torch

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        torch.empty(1 << 33)


def stand(*_):
    while True:
        time.sleep(3600)  # not a wait: it is the fault


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                execute = spec.loader.exec_module

                def execute_and_register(module, execute=execute):
                    execute(module)
                    folder = os.path.join(os.environ["DRILL_ORDERS"], os.environ.get("MUSTER_JOB") or os.environ["RUN"])
                    module.register_optimizer_step_post_hook(Rank(folder, os.environ["RANK"]).stepped)

                spec.loader.exec_module = execute_and_register
                return spec
        return None


if os.environ.get("DRILL_ORDERS") and os.environ.get("RANK"):
    sys.meta_path.insert(0, Finder())
