"""`python -m muster.worker`: the launcher of a program of the user's own."""

import json
import os
import sys
import time

PYTHON_MIN = (3, 9)


def refuse_old_python() -> int:
    """Say that this Python is too old, in words that it can still read, and leave the exit record."""
    mine, needed = ".".join(map(str, sys.version_info[:2])), ".".join(map(str, PYTHON_MIN))
    words = f"the image's python3 is {mine}, and programs need Python {needed} or newer; use a newer image"
    sys.stderr.write(f"muster: worker ends with exit code 80: {words}\n")
    record = json.dumps({"exitCode": 80, "at": time.time(), "message": words})
    folder = os.environ.get("MUSTER_WORKER_DIR") or "."
    for path in (os.path.join(folder, "exit.json"), os.environ.get("MUSTER_TERMINATION_LOG")):
        if path:
            try:
                with open(path, "w") as file:
                    file.write(record)
            except OSError as error:
                sys.stderr.write(f"muster: can't write {path}: {error}\n")
    return 80


if __name__ == "__main__":
    if sys.version_info < PYTHON_MIN:
        sys.exit(refuse_old_python())
    from muster.worker.early_stop import end_on_signals

    end_on_signals()
    from muster.worker.output import survive_full_log

    survive_full_log()
    from muster.worker.launcher import main

    result = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result)
