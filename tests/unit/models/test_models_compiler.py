"""Kernels are compiled as a job trains, where there is a compiler; where there is none, nothing fails for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from muster.trainer.errors import UserError
from muster.trainer.models import compiler
from muster.trainer.models.attention import by_blocks


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    compiler.has_compiler.cache_clear()
    yield
    compiler.has_compiler.cache_clear()


def rows(length: int, is_cuda: bool = True) -> torch.Tensor:
    return cast(Any, SimpleNamespace(is_cuda=is_cuda, shape=(2, length)))  # type: ignore[no-any-return]


def test_packed_rows_are_attended_to_by_blocks_where_kernels_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.trainer.models.attention.has_compiler", lambda: True)
    assert by_blocks(rows(128), half=True)
    assert not by_blocks(rows(127), half=True), "its kernel for decoding refuses many shapes"
    assert not by_blocks(rows(128), half=False)
    assert not by_blocks(rows(128, is_cuda=False), half=True)
    monkeypatch.setattr("muster.trainer.models.attention.has_compiler", lambda: False)
    assert not by_blocks(rows(128), half=True)


def test_without_a_compiler_compile_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"parallel.compile: there is no C compiler here .* install gcc"):
        compiler.must_have_compiler()
    compiler.has_compiler.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(compiler.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert not compiler.has_compiler()
