"""Ends a rank by SIGKILL in the middle of a step that the test names, so that no test has to be quicker than a gang.

Python imports this file by itself in processes whose PYTHONPATH names this folder. `MUSTERTESTS_KILL` is
`rank:step:seconds`: the rank dies so many seconds after it has begun that step of its attempt.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import threading

TARGET = "muster.trainer.data.loader"


def deadly(honest):
    """`RankLoader.next`, which is called once as each step begins."""
    rank, step, seconds = os.environ["MUSTERTESTS_KILL"].split(":")
    begun = 0

    def following(self):
        nonlocal begun
        begun += 1
        if os.environ.get("RANK") == rank and begun == int(step):
            threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
        return honest(self)

    return following


class Finder(importlib.abc.MetaPathFinder):
    """Changes the one method as its module is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.RankLoader.next = deadly(module.RankLoader.next)

        spec.loader.exec_module = exec_module
        return spec


if "MUSTERTESTS_KILL" in os.environ:
    sys.meta_path.insert(0, Finder())
