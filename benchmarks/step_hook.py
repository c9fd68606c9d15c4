"""Cost of counting a program's optimizer steps (muster/worker/hook), beside the same steps without the hook.

    python benchmarks/step_hook.py [--steps 20000]

The same small AdamW steps run in turns with the hook registered and without it, and the median over the turns is
compared. Counted is the processor's time of the whole process, so that other work on the machine has no part in it, and
the reports to the disk have theirs, at most one a second as in a job.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HOOK = Path(__file__).resolve().parents[1] / "trainer_image" / "muster" / "worker" / "hook" / "sitecustomize.py"
TURNS = 20
BOUND_SECONDS = 50e-6  # a step, as issue 36 allows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="steps in all, of each kind")
    steps = parser.parse_args().steps // TURNS

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    spec = importlib.util.spec_from_file_location("step_hook", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    optimizer = torch.optim.AdamW([weight])
    with tempfile.TemporaryDirectory() as folder:
        counter = module.StepCounter(str(Path(folder) / "rank-0.progress.json"), 0)

        def turn(counted: bool) -> float:
            handle = register_optimizer_step_post_hook(counter.stepped) if counted else None
            began = time.process_time()
            for _ in range(steps):
                optimizer.step()
            took = time.process_time() - began
            if handle is not None:
                handle.remove()
            return took / steps

        turn(True)  # warm
        pairs = [(turn(False), turn(True)) for _ in range(TURNS)]
    alone, counted = (statistics.median(pair[kind] for pair in pairs) for kind in (0, 1))
    cost = statistics.median(with_hook - without for without, with_hook in pairs)
    print(
        f"a step alone {alone * 1e6:.1f} µs, counted {counted * 1e6:.1f} µs (x {counted / alone:.3f}); "
        f"the hook costs {cost * 1e6:.1f} µs a step"
    )
    return 0 if cost <= BOUND_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
