"""Objectives keep nothing from one batch to the next, so that a resume has nothing of theirs to bring back."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.trainer.test_trainer_objectives import config, models, rows

from muster.trainer.data.batch import TokenBatch
from muster.trainer.models.pretrained import with_our_forward
from muster.trainer.train import tasks
from muster.trainer.train.tasks.answers import answers
from muster.trainer.train.tasks.choice import MAKERS, objective_of

__all__ = ["models"]  # a fixture

# Every task that `choice` makes an objective for, and the variants of those with settings that change the loss.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((task, {}) for task in MAKERS),
    ("dpo", {"loss": "ipo"}),
    ("dpo", {"lengthNormalized": True, "sftWeight": 0.5}),
    ("simpo", {"labelSmoothing": 0.1, "sftWeight": 0.3}),
    ("kto", {"undesirableWeight": 1.5}),
]


@pytest.mark.parametrize(
    ("task", "settings"), [pair for pair in VARIANTS if pair[0] not in ("pretrain", "sft", "reward")]
)
def test_a_batch_leaves_no_trace_in_a_preference_objective(
    models: tuple[Any, Any], task: str, settings: dict[str, Any]
) -> None:
    reference, policy = (with_our_forward(copy.deepcopy(each), "none", "positions") for each in models)
    objective = objective_of(config(task, **settings))
    batch = TokenBatch.of(rows(task == "kto"))
    if objective.stored_reference:
        with torch.no_grad():
            batch.reference = answers(reference, batch).log_probs.flatten(1)
    before = copy.deepcopy(vars(objective))
    first, again = (objective.loss(policy, batch) for _ in range(2))
    assert torch.equal(first.sum, again.sum)
    assert torch.equal(first.count, again.count)
    assert vars(objective) == before


def _methods_that_store(text: str) -> list[str]:
    """Methods other than __init__ that assign to `self`, change what it holds, or reach for a global."""
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    methods = [(each.name, method) for each in classes for method in each.body if isinstance(method, ast.FunctionDef)]
    return [
        f"{name}.{method.name}"
        for name, method in methods
        if method.name != "__init__" and any(_stores(part) for part in ast.walk(method))
    ]


def _stores(node: ast.AST) -> bool:
    if isinstance(node, ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changes = {"append", "extend", "update", "setdefault", "pop", "add", "clear", "__setattr__", "copy_", "add_"}
        return node.func.attr in changes and _of_self(node.func.value)
    return isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store) and _of_self(node.value)


def _of_self(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def test_no_method_of_an_objective_stores_anything() -> None:
    """Also of those that need second models. `LossTotals` adds up one evaluation, and is made anew for each."""
    folder = Path(tasks.__path__[0])
    stores = {
        path.name: found for path in sorted(folder.glob("*.py")) if (found := _methods_that_store(path.read_text()))
    }
    assert stores == {"objective.py": ["LossTotals.add"]}


def test_a_method_that_stores_is_found() -> None:
    assert _methods_that_store("class A:\n    def loss(self):\n        self.seen[0] += 1\n") == ["A.loss"]
    assert _methods_that_store("class A:\n    def loss(self):\n        self.seen.append(1)\n") == ["A.loss"]
    assert _methods_that_store("class A:\n    def loss(self):\n        self.total = 1\n") == ["A.loss"]
    assert _methods_that_store("class A:\n    def loss(self):\n        return self.total + 1\n") == []
