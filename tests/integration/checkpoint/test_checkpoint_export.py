"""An exported commit is the same model in `transformers`, tied or not, whole or in pieces; nothing half-written is
left."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.integration.checkpoint.one_rank import identity, outcomes, state
from transformers import AutoModelForCausalLM

from muster.recipe.architecture import Architecture, RopeScaling
from muster.storage.file_store import FileStore
from muster.trainer.checkpoint import CheckpointSaver
from muster.trainer.convert import hugging_face
from muster.trainer.convert.export import export, main
from muster.trainer.convert.pieces import runs_of
from muster.trainer.convert.tensor_files import to_bf16
from muster.trainer.errors import UserError
from muster.trainer.models.decoder import Decoder, build
from muster.words.base import dump
from muster.words.checkpoint import Slice
from muster.words.job import Keep
from muster.words.names import ExitCode


def decoder(tied: bool) -> Decoder:
    shape = Architecture(
        dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=80, vocab_size=260, max_positions=64, rope_theta=5_000.0,
        norm_eps=1e-6, tied_head=tied,
        rope_scaling=None if tied else RopeScaling(factor=8, original_max_positions=16),
    )  # fmt: skip
    model = build(shape).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    return model


def committed(model: Decoder, folder: Path) -> None:
    about = identity(folder.as_uri())
    about = type(about)(**{**about.__dict__, "architecture": dump(model.architecture)})
    saver = CheckpointSaver(about, Keep(), {})
    try:
        saver.save(state(model, torch.optim.AdamW(model.parameters()), 5))
        assert outcomes(saver) == [(5, True, None)]
    finally:
        saver.close()


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, torch.zeros_like(tokens))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("file_bytes", [None, 30_000])
def test_transformers_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, file_bytes: int | None
) -> None:
    if file_bytes:
        monkeypatch.setattr(hugging_face, "FILE_BYTES_MAX", file_bytes)
    model = decoder(tied)
    committed(model, tmp_path / "uid")
    report = export(FileStore(tmp_path / "uid"), "last", tmp_path / "model")
    assert (len(report["files"]) > 1) is bool(file_bytes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (theirs(tokens).logits - logits(model, tokens)).abs().max().item()
    assert difference <= 1e-5
    assert theirs.config.tie_word_embeddings is tied
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) is tied


def test_integer_buffers_come_along_bit_by_bit(tmp_path: Path) -> None:
    model = decoder(True)
    buffers = {
        "tokens_seen": torch.tensor([3, 2**53 + 1, -1]),
        "layers.1.routed": torch.tensor([[1, -128]], dtype=torch.int8),
        "layers.2.masked": torch.tensor([True, False, True]),
    }
    for name, value in buffers.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner).register_buffer(own, value)
    committed(model, tmp_path / "uid")
    export(FileStore(tmp_path / "uid"), "last", tmp_path / "model", "bf16")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: exported[name].tolist() for name in buffers} == {n: b.tolist() for n, b in buffers.items()}
    assert {name: exported[name].dtype for name in buffers} == {n: b.dtype for n, b in buffers.items()}
    export(FileStore(tmp_path / "uid"), "last", tmp_path / "exact")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    tokens = torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (theirs(tokens).logits - logits(model, tokens)).abs().max().item() <= 1e-5


def test_bf16_is_what_torch_makes_of_it(tmp_path: Path) -> None:
    model = decoder(True)
    committed(model, tmp_path / "uid")
    assert export(FileStore(tmp_path / "uid"), 5, tmp_path / "model", "bf16")["dtype"] == "bfloat16"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert torch.equal(theirs.model.embed_tokens.weight, model.embed.weight.to(torch.bfloat16))
    values = torch.tensor([0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, float("inf"), float("-inf"), 1e-40])
    assert to_bf16(values.numpy().tobytes()) == values.to(torch.bfloat16).view(torch.uint16).numpy().tobytes()
    assert torch.frombuffer(
        bytearray(to_bf16(torch.tensor([float("nan")]).numpy().tobytes())), dtype=torch.bfloat16
    ).isnan()


@given(data=st.data(), shape=st.lists(st.integers(1, 4), max_size=4).map(tuple))
def test_the_runs_of_a_box_put_every_element_in_its_place(data: st.DataObject, shape: tuple[int, ...]) -> None:
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(data.draw(st.integers(1, size - o)) for size, o in zip(shape, offset, strict=True))
    whole = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.uint8).view(shape)
    cut = whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))].contiguous()
    source, target = bytes(7) + bytes(cut.flatten().tolist()), bytearray(whole.numel())
    for run in runs_of(Slice(file=0, name="x", offset=offset, extent=extent), shape, 1, 7):
        target[run.at : run.at + run.length] = source[run.start : run.start + run.length]
    expected = torch.zeros_like(whole)
    expected[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))] = cut
    assert list(target) == expected.flatten().tolist()


def test_it_never_writes_over_something_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    committed(decoder(True), tmp_path / "uid")
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="is there already"):
        export(FileStore(tmp_path / "uid"), "last", tmp_path / "model")
    shard = next((tmp_path / "uid").glob("step-*/*/*"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert main(["--checkpoint", str(tmp_path / "uid"), "--to", str(tmp_path / "other"), "--json"]) == ExitCode.STORAGE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "uid"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--format", "gguf"), "--format must be transformers (or hf) or peft, not 'gguf'"),
        (("--step", "newest"), "--step must be best, last or a number, not 'newest'"),
        (("--dtype", "fp8"), "argument --dtype: invalid choice: 'fp8'"),
    ],
)
def test_what_can_not_be_exported_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: tuple[str, str], says: str
) -> None:
    arguments = ["--checkpoint", str(tmp_path / "uid"), "--to", str(tmp_path / "model"), "--json", *wrong]
    assert main(arguments) == ExitCode.USER_ERROR
    assert json.loads(capsys.readouterr().err)["error"].startswith(says)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_no_llama_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"no name in a Hugging Face Llama for: conv\.weight, layers\.0\.gate"):
        hugging_face.names({"embed.weight": "F32", "conv.weight": "F32", "layers.0.gate": "BF16", "seen": "I64"})


def test_it_runs_without_torch(tmp_path: Path) -> None:
    committed(decoder(True), tmp_path / "uid")
    code = (
        "import sys; sys.modules['torch'] = None; "
        "from muster.trainer.convert.export import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--checkpoint", str(tmp_path / "uid"), "--to", str(tmp_path / "model"), "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 5


def test_a_small_model_is_not_0_0_mb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed(decoder(True), tmp_path / "uid")
    assert main(["--checkpoint", str(tmp_path / "uid"), "--to", str(tmp_path / "model")]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"step 5 exported to .*/model: [1-9][\d.]* KiB, float32\n", said), said


def test_what_a_job_linked_into_its_folder_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever exports it may read more than the job that wrote it."""
    (tmp_path / "another" / "commits").mkdir(parents=True)
    (tmp_path / "uid").mkdir()
    (tmp_path / "uid" / "commits").symlink_to(tmp_path / "another" / "commits", target_is_directory=True)
    asked = ["--checkpoint", str(tmp_path / "uid"), "--to", str(tmp_path / "out"), "--step", "last"]
    assert main(asked) != 0
    assert "what leads to it is no folder" in capsys.readouterr().err
