"""`python -m muster.trainer.launch`: a worker's first process."""

import os
import sys

from muster.trainer.launch.worker import main

if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result)
