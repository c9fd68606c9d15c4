"""An exported adapter has the names and numbers that `peft` reads; merged, it is part of the weights that
`transformers` reads. That both compute what the trainer does is shown in test_trainer_lora.py."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.integration.checkpoint.one_rank import identity, outcomes, state

from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import Architecture
from muster.storage.file_store import FileStore
from muster.trainer.checkpoint import CheckpointSaver
from muster.trainer.convert import hugging_face, merge
from muster.trainer.convert.export import export, main
from muster.trainer.errors import UserError
from muster.trainer.models.decoder import Decoder, build
from muster.trainer.models.lora import attach
from muster.words.base import dump
from muster.words.job import Keep
from muster.words.names import ExitCode

SHAPE = Architecture(dim=48, layers=2, heads=6, kv_heads=2, ffn_dim=80, vocab_size=260, max_positions=64)
ADAPTER = Adapter(rank=3, alpha=7.5, targets=("q_proj", "up_proj"))
ORIGIN = {"job": "base", "uri": "s3://c/base-uid", "step": "best"}


def decoder(adapter: Adapter | None = ADAPTER) -> Decoder:
    model = build(SHAPE)
    if adapter is not None:
        attach(model, adapter)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def committed(model: Decoder, folder: Path, adapter: dict[str, Any] | None) -> FileStore:
    config = {"model": {"from": ORIGIN}} | ({"adapter": adapter} if adapter else {})
    saving = CheckpointSaver(replace(identity(folder.as_uri()), architecture=dump(SHAPE), config=config), Keep(), {})
    try:
        saving.save(state(model, torch.optim.AdamW(model.parameters()), 5))
        assert outcomes(saving) == [(5, True, None)]
    finally:
        saving.close()
    return FileStore(folder)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, FileStore]:
    """A model with its adapter, and the folder that it is committed in."""
    model = decoder()
    return model, committed(model, tmp_path_factory.mktemp("adapted") / "uid", dump(ADAPTER))


def merged(model: Decoder, name: str) -> torch.Tensor:
    own = dict(model.named_parameters())
    module = name.removesuffix(".weight")
    a, b = own.get(f"{module}.lora_A.weight"), own.get(f"{module}.lora_B.weight")
    return own[name].detach() if a is None or b is None else (own[name] + 2.5 * (b @ a)).detach()


def test_the_adapter_alone(tmp_path: Path, adapted: tuple[Decoder, FileStore]) -> None:
    model, store = adapted
    report = export(store, "last", tmp_path / "adapter", form="peft")
    assert (report["files"], report["adapter"], report["tensors"]) == (["adapter_model.safetensors"], "alone", 8)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    own = dict(model.named_parameters())
    expected = {
        f"base_model.model.model.layers.{layer}.{theirs}.lora_{part}.weight": own[
            f"layers.{layer}.{ours}.lora_{part}.weight"
        ]
        for layer in range(2)
        for ours, theirs in (("attention.q_proj", "self_attn.q_proj"), ("feed_forward.up_proj", "mlp.up_proj"))
        for part in "AB"
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 7.5)
    assert config["target_modules"] == ["q_proj", "up_proj"]
    assert json.loads((tmp_path / "adapter" / "muster.json").read_text())["from"] == ORIGIN
    export(store, "last", tmp_path / "half", "bf16", form="peft")
    halves = load_file(tmp_path / "half" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in halves.items())


@pytest.mark.parametrize("file_bytes", [None, 30_000])
def test_merged_into_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapted: tuple[Decoder, FileStore], file_bytes: int | None
) -> None:
    if file_bytes:
        monkeypatch.setattr(hugging_face, "FILE_BYTES_MAX", file_bytes)
    model, store = adapted
    report = export(store, "last", tmp_path / "model")
    assert report["adapter"] == "merged"
    assert (len(report["files"]) > 1) is bool(file_bytes)
    found = {name: tensor for file in report["files"] for name, tensor in load_file(tmp_path / "model" / file).items()}
    names = hugging_face.names({name: "F32" for name, _ in model.named_parameters() if "lora_" not in name})
    assert found.keys() == set(names.values())
    for ours, theirs in names.items():
        torch.testing.assert_close(found[theirs], merged(model, ours), rtol=0, atol=1e-6)
    untouched = [name for name in names if "q_proj" not in name and "up_proj" not in name]
    own = dict(model.named_parameters())
    assert all(torch.equal(found[names[name]], own[name]) for name in untouched)
    report = export(store, "last", tmp_path / "half", "bf16")
    halves = {n: tensor for file in report["files"] for n, tensor in load_file(tmp_path / "half" / file).items()}
    assert all(torch.equal(tensor, found[name].bfloat16()) for name, tensor in halves.items())


@given(data=st.data(), outputs=st.integers(1, 5), inputs=st.integers(1, 5))
def test_any_part_of_a_weight_gets_its_part_of_the_product(data: st.DataObject, outputs: int, inputs: int) -> None:
    dice = np.random.default_rng(1)
    a, b = dice.normal(size=(2, inputs)).astype("f4"), dice.normal(size=(outputs, 2)).astype("f4")
    weight = dice.normal(size=(outputs, inputs)).astype("f4")
    first = data.draw(st.integers(0, weight.size - 1))
    last = data.draw(st.integers(first + 1, weight.size))
    part = memoryview(bytearray(weight.tobytes()))[4 * first : 4 * last]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "BLOCK_ELEMENTS", data.draw(st.sampled_from([1, 7, 2**18])))
        merge.WeightDelta(a, b).add_to(part, 4 * first)
    found = np.frombuffer(part, "f4")
    np.testing.assert_allclose(found, (weight + b @ a).reshape(-1)[first:last], rtol=1e-5, atol=1e-6)


def test_a_commit_without_an_adapter_has_none_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed(decoder(None), tmp_path / "uid", None)
    arguments = ["--checkpoint", str(tmp_path / "uid"), "--to", str(tmp_path / "adapter"), "--format", "peft", "--json"]
    assert main(arguments) == ExitCode.USER_ERROR
    said = json.loads(capsys.readouterr().err)["error"]
    assert said.startswith("the checkpoint at step 5 in ")
    assert said.endswith(" has no adapter: that job trained the whole model; leave --format out to get it")
    assert [path.name for path in tmp_path.iterdir()] == ["uid"]


def test_an_adapter_of_a_newer_muster_is_not_guessed_at(tmp_path: Path) -> None:
    store = committed(decoder(), tmp_path / "uid", {"kind": "loha", "rank": 3})
    with pytest.raises(UserError, match=r"step 5 of job 'job' has an adapter unknown here .*use the Muster"):
        export(store, "last", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["uid"]


def test_it_runs_without_torch(tmp_path: Path, adapted: tuple[Decoder, FileStore]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from muster.trainer.convert.export import main\n"
        "for form in ('hf', 'peft'): assert main([*sys.argv[1:], '--to', form, '--format', form]) == 0"
    )
    command = [sys.executable, "-c", code, "--checkpoint", adapted[1].uri, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["adapter"] for line in done.stdout.splitlines()] == ["merged", "alone"]
