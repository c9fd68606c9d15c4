"""Faults from within a rank: Python imports this file by itself in workers whose PYTHONPATH names this folder.

Nothing of Muster knows of it. A rank that finds an order, `<DRILL_ORDERS>/<job>/rank-<rank>.json`, obeys it in its next
forward pass, where a fault of the user's code, the data or the machine would strike. An order is carried out once (the
file is renamed first, so a restarted rank is healthy) unless it says how many `passes` it lasts; `after` is how many
passes the rank makes first.
"""

import dataclasses
import importlib.abc
import importlib.util
import json
import os
import resource
import sys
import time
import zlib

TARGET = "muster.trainer.train.tasks.next_token"
PASSES_MEASURED = 20


class Orders:
    """One rank's orders. tensors are left to the caller, so that this file imports no torch."""

    def __init__(self):
        name = f"rank-{os.environ['RANK']}"
        folder = os.path.join(os.environ["DRILL_ORDERS"], os.environ["MUSTER_JOB"])
        self.order = os.path.join(folder, f"{name}.json")
        self.done = os.path.join(folder, f"{name}.done.json")
        self.passes = 0
        self.lasting = None  # [order, passes left]
        self.pace = []  # seconds between passes, while healthy
        self.last = None
        self.bug = None  # the batch that it meets

    def meets_bug(self, batch):
        if self.bug is None and os.path.exists(self.done):
            with open(self.done) as file:
                self.bug = json.load(file).get("batch", 0)
        return self.bug and self.bug == checksum(batch)

    def plant_bug(self, batch):
        with open(self.done) as file:
            note = json.load(file)
        with open(f"{self.done}.part", "w") as file:
            json.dump({**note, "batch": checksum(batch)}, file)
        os.replace(f"{self.done}.part", self.done)

    def next(self):
        """The order that this pass obeys, if any."""
        now = time.monotonic()
        if self.lasting is None:
            if self.last is not None:
                self.pace = [*self.pace[-PASSES_MEASURED:], now - self.last]
            if os.path.exists(self.order) and self.is_due():
                self.lasting = self.take()
        self.passes += 1
        self.last = now
        if self.lasting is None:
            return None
        order, self.lasting[1] = self.lasting[0], self.lasting[1] - 1
        if self.lasting[1] <= 0:
            self.lasting = None
        return order

    def is_due(self):
        with open(self.order) as file:
            return self.passes >= json.load(file).get("after", 0)

    def take(self):
        with open(self.order) as file:
            order = json.load(file)
        note = {**order, "at": time.time()}
        with open(f"{self.done}.part", "w") as file:
            json.dump(note, file)
        os.remove(self.order)
        os.replace(f"{self.done}.part", self.done)
        return [order, order.get("passes", 1)]


def faulty(make_objective):
    """The trainer's `make_objective`, whose objectives obey orders."""

    def with_faults(training):
        objective, orders = make_objective(training), Orders()
        honest = objective.loss

        def loss(model, batch):
            order = orders.next()
            kind = order["kind"] if order else None
            if kind == "exit":
                os._exit(order["code"])
            if kind == "raise":
                raise RuntimeError("the drill's bug, this once")
            if kind == "bug":
                orders.plant_bug(batch)
            if orders.meets_bug(batch):
                raise RuntimeError("the drill's bug in this batch")
            if kind == "memory":
                out_of_memory()
            if kind == "hang":
                while True:
                    time.sleep(3600)  # not a wait: it is the fault
            if kind == "slow":
                healthy = sorted(orders.pace)[len(orders.pace) // 2]
                time.sleep((order["factor"] - 1) * healthy)  # not a wait: it is the fault
            value = honest(model, batch)
            return dataclasses.replace(value, sum=value.sum * order["by"]) if kind == "scale" else value

        objective.loss = loss
        return objective

    return with_faults


def checksum(batch):
    return zlib.crc32(batch.tokens.numpy().tobytes())


def out_of_memory():
    """A real allocation that the system really refuses."""
    import torch

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    torch.empty(1 << 30, dtype=torch.uint8).fill_(1)


class Finder(importlib.abc.MetaPathFinder):
    """Changes the one function as its module is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.make_objective = faulty(module.make_objective)

        spec.loader.exec_module = exec_module
        return spec


if "DRILL_ORDERS" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, Finder())
