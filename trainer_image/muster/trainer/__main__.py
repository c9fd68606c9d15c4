"""A rank's process: `python -m muster.trainer` with torchrun's variables. Its exit code tells the truth."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from muster.trainer.checkpoint.upload_process import fork_while_young
from muster.trainer.config import RankPosition, WorkerRun, read_ranks, read_run
from muster.trainer.errors import PeerLost, exit_code, is_lost_peer, is_out_of_memory
from muster.trainer.launch.process_control import die_with_parent, process_started_at
from muster.trainer.launch.rank_lines import mark_lines
from muster.trainer.launch.stack_dumps import answer_dumps
from muster.trainer.train.rank_state import RankState
from muster.words.names import Env, ExitCode
from muster.words.redaction import redact


def main() -> int:
    die_with_parent()
    fork_while_young(os.environ.get(Env.CHECKPOINT_URI, ""))
    ranks = read_ranks()
    mark_lines(ranks.rank, ranks.local_rank)
    directory = Path(os.environ.get(Env.WORKER_DIR) or ".")
    directory.mkdir(parents=True, exist_ok=True)
    attempt, incarnation = (_number(name) for name in (Env.ATTEMPT, Env.INCARNATION))
    rank_state = RankState(directory, attempt, ranks.rank, process_started_at(), incarnation)
    rank_state.heartbeats.start()
    answer_dumps(directory, ranks.rank)
    try:
        run = read_run()
        code = _train()(run, ranks, rank_state)  # torch is loaded after everything that can fail without it
        if code != ExitCode.DONE:
            code = rank_state.fail(code, f"stopped at step {rank_state.step} when asked to")
    except BaseException as error:
        code = _failed(rank_state, error)
    rank_state.heartbeats.beat()
    return code


def _train() -> Callable[[WorkerRun, RankPosition, RankState], int]:
    """The training loop. Loading it makes a quarter of a million objects that never become garbage.

    Looking for some among them would cost a tenth of the start, and a pause now and then while all other ranks wait.
    """
    gc.disable()
    from muster.trainer.train.loop import train

    gc.freeze()
    gc.enable()
    return train


def _number(variable: str) -> int:
    """Return an attempt or an incarnation; the first where it is not set, or is no number, which is refused later."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 1


def _failed(rank_state: RankState, error: BaseException) -> int:
    """Leave word of the error; its exit code."""
    kind, text = type(error).__name__, str(error)
    code = exit_code(error)
    if code == 1 and is_out_of_memory(kind, text):
        code = int(ExitCode.OUT_OF_MEMORY)
    elif code == 1 and is_lost_peer(kind, text):
        code = exit_code(PeerLost())
        text = f"lost another rank (the cause is with that one): {text.strip().splitlines()[0].split('. ')[0][:300]}"
    classified = code != 1
    message = text if classified else f"{kind}: {text}"
    trace = "".join(traceback.format_exception(error))
    code = rank_state.fail(code, message, trace)
    said = redact(message if classified else trace)
    print(f"rank {rank_state.rank} ends with exit code {code}: {said}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a process group whose peers are gone, or a library's thread, may hang in the interpreter's teardown.
    os._exit(result)
