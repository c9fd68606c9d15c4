"""`python -m muster.trainer.launch`: a worker's first process."""

import os
import sys

from muster.worker.early_stop import end_on_signals

if __name__ == "__main__":
    end_on_signals()
    from muster.worker.output import survive_full_log

    survive_full_log()
    from muster.trainer.launch.worker import main

    result = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result)
