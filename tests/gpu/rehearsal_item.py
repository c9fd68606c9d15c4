"""The process of one line of the rehearsal's table: `python -m tests.gpu.rehearsal_item NAME [WORD…]`."""

import sys

from tests.gpu import checks, measure
from tests.gpu.rehearsal import item_main

NAMES = {check.__name__: check for check in checks.CHECKS}
NAMES |= {each.__name__: each for each in (measure.speed_of, measure.blocked_by_commits, measure.agent_sees)}

if __name__ == "__main__":
    sys.exit(item_main(NAMES, sys.argv[1:]))
