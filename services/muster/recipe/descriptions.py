"""Descriptions of fields, for `kubectl explain` and editors: the text literal below each field.

Sphinx and pydantic read such literals too. They are looked for only when a schema is written, because reading the
source of every model would make each process start slower.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel


def describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Write the descriptions of all fields into the JSON schema of `model`, in place."""
    models = _models_within(model)
    for name, definition in {**schema.get("$defs", {}), model.__name__: schema}.items():
        for field, text in field_descriptions(models[name]).items() if name in models else ():
            definition["properties"][models[name].model_fields[field].alias or field]["description"] = text


def field_descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The text below each field of a model and of the models that it extends, by the field's name in Python."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__.startswith("muster."):
            texts |= dict(_described(_classes(base.__module__)[base.__qualname__]))
    return {name: text for name, text in texts.items() if name in model.model_fields}


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by their qualified names. inspect.getsource would parse the whole module for each."""
    classes: dict[str, ast.ClassDef] = {}

    def visit(body: list[ast.stmt], outer: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                classes[outer + node.name] = node
                visit(node.body, f"{outer}{node.name}.")

    visit(ast.parse(inspect.getsource(sys.modules[module])).body, "")
    return classes


def _described(definition: ast.ClassDef) -> list[tuple[str, str]]:
    return [
        (field.target.id, " ".join(inspect.cleandoc(below.value.value).split()))
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    ]


def _models_within(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The model and those of its fields, by name. Models elsewhere may have the same names."""
    models: dict[str, type[BaseModel]] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ not in models:
            models[kind.__name__] = kind
            for field in kind.model_fields.values():
                visit(field.annotation)
        for argument in get_args(kind):
            visit(argument)

    visit(model)
    return models
