"""The configuration by which a model is scored without training."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from muster.trainer.errors import UserError
from muster.trainer.train.scoring import configuration, main

GIVEN: dict[str, Any] = {
    "model": "checkpoint",
    "data": "held-out.jsonl",
    "task": "sft",
    "sequence_length": 64,
    "precision": "fp32",
    "format": "auto",
    "train_on": "last",
    "chat_template": None,
    "no_packing": True,
}


def test_data_is_prepared_as_a_job_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration(Namespace(**GIVEN), world=2)
    assert config.data.train[0].source == (tmp_path / "held-out.jsonl").as_uri()
    assert config.model.source == (tmp_path / "checkpoint").as_uri()
    assert (config.data.packing, config.data.train_on, config.evaluation) == (False, "last", None)
    assert config.batch.tokens_per_step == 128  # a row of each rank
    assert configuration(Namespace(**{**GIVEN, "data": "s3://bucket/x"}), 1).data.train[0].source == "s3://bucket/x"


def test_what_no_job_could_read_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"nothing can be scored: data\.train\[0\]\.format"):
        configuration(Namespace(**{**GIVEN, "format": "chat"}), 1)


def test_a_model_that_is_not_there_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_DEVICE", "cpu")
    assert main(["--data", "x.jsonl", "--task", "sft", "--sequence-length", "64", "--model", "nowhere"]) == 80
    assert "holds no config.json" in capsys.readouterr().err
