"""Folders of models: what is wrong with one is said before a weight is read, and where they may lie."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model_families import edit_json, write_model

from muster.recipe.adapter_config import Adapter
from muster.recipe.training import TrainingConfig
from muster.storage.file_store import FileStore
from muster.storage.model_folder import ModelFolder, open_folder
from muster.trainer.data.tokenizer_files import template_sources
from muster.trainer.errors import UserError
from muster.trainer.models.files import open_files
from muster.trainer.models.lazy_tensors import LazyTensor, ReadRange
from muster.trainer.models.loading import is_finite
from muster.trainer.models.transformers_model import from_folder
from muster.trainer.train import origin


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    write_model(folder, "llama-3.1")
    return folder


def training(source: str, **changes: Any) -> TrainingConfig:
    document: dict[str, Any] = {
        "model": {"source": source},
        "data": {"train": [{"source": "x"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 64},
        "length": {"steps": 1},
    }
    return TrainingConfig.model_validate(document | changes)


def started(folder: Path, **changes: Any) -> torch.nn.Module:
    """What a job does with its model before it meets the other ranks, and its weights after that."""
    config = training(folder.as_uri(), **changes)
    found = origin._from_folder(config, folder.as_uri())
    model = found.model.build(torch.float32, "none")
    found.model.fill(model, torch.device("cpu"), 0, values=True)
    return model


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = first_file(folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def truncate(folder: Path) -> None:
    path = first_file(folder)
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    path = first_file(folder)
    path.write_bytes(path.read_bytes()[:40])


def pickle_it(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def put_nan(tensors: dict[str, torch.Tensor]) -> None:
    next(tensor for name, tensor in tensors.items() if "embed" in name)[3, 4] = float("nan")


def slow_tokenizer(kind: str, *files: str, **more: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **more}))
        for name in files:
            (folder / name).write_bytes(b"\x0a\x0e")

    return change


def config_with(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def stray_single(folder: Path) -> None:
    """A file of all weights, with other values, beside an index and its files."""
    tensors = {name: tensor * 2 for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def as_mlx(bits: int) -> Callable[[Path], None]:
    """As mlx-lm quantises a layer: packed in U32, with scales and biases."""

    def change(folder: Path) -> None:
        settings = {"group_size": 64, "bits": bits}
        edit_json(folder / "config.json", quantization=settings, quantization_config=settings)
        rewritten(folder, pack)

    return change


def pack(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensors[name] = tensors[name][:, :8].contiguous().view(torch.int32).to(torch.uint32)


def adapter_alone(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    (folder / "adapter_config.json").write_text("{}")


def gguf_alone(folder: Path) -> None:
    adapter_alone(folder)
    (folder / "adapter_config.json").rename(folder / "model-Q4_K_M.gguf")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"holds no config.json; give the folder that `model.save_pretrained\(folder\)` wrote",
    ),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "no weights": (
        lambda folder: [path.unlink() for path in folder.glob("model*")],
        "holds neither model.safetensors nor model.safetensors.index.json",
    ),
    "a missing file": (
        lambda folder: first_file(folder).unlink(),
        r"names files that are not there: model-00001-of-0000\d.safetensors",
    ),
    "a file outside": (
        lambda folder: edit_json(folder / "model.safetensors.index.json", weight_map={"a": "../b.safetensors"}),
        "names files outside the folder: ../b.safetensors; put all beside it",
    ),
    "truncated weights": (truncate, r"model-00001.* is truncated: its header promises [\d,]+ bytes"),
    "truncated header": (cut_header, r"model-00001.* is truncated: it ends within its header"),
    "pickled weights": (pickle_it, r"pytorch_model.bin, a pickle.*save_pretrained\(new_folder\)` writes safetensors"),
    "other shapes": (
        config_with(intermediate_size=56),
        r"(?s)contradict its config.json.*layers.0.mlp.down_proj.weight: shape \[32, 48\] in the folder, \[32, 56\] by "
        r"config.json.*layers.1.mlp.up_proj.weight: shape \[48, 32\]",
    ),
    "a layer too few": (
        config_with(num_hidden_layers=1),
        r"(?s)layers.1.input_layernorm.weight: the folder has it, the model does not",
    ),
    "a layer too many": (
        config_with(num_hidden_layers=3),
        r"(?s)layers.2.mlp.up_proj.weight: the model has it, the folder does not",
    ),
    "NaN": (lambda folder: rewritten(folder, put_nan), r"no numbers \(NaN or infinite\) in model.embed_tokens.weight"),
    "an unknown architecture": (
        config_with(model_type="llamma"),
        r"transformers 5\.\S+ knows no architecture 'llamma'; the nearest it knows is llama",
    ),
    "code in the folder": (
        config_with(model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
        r"code of its own \(modeling_mine.Mine\), which Muster never runs",
    ),
    "quantised weights": (
        config_with(quantization_config={"quant_method": "gptq", "bits": 4}),
        r"quantised \(gptq\), which can't be trained; take the model's original weights",
    ),
    "weights quantised for serving": (
        config_with(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
        r"quantised \(awq\), which can't be trained; .*adapter.kind qlora to train beside 4-bit ones",
    ),
    "an MLX folder": (
        as_mlx(4),
        r"an MLX 4-bit folder: its weights are quantised, which can't be trained; take the model",
    ),
    "packed weights without a word in config.json": (
        lambda folder: rewritten(folder, pack),
        r"safetensors: \S+ has dtype U32, as quantised weights have, which can't be trained; take the model's original",
    ),
    "a pointer of Git LFS": (
        lambda folder: first_file(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        r"model-00001.* is a pointer of Git LFS, not the file itself; run `git lfs pull`",
    ),
    "a web page": (
        lambda folder: (folder / "config.json").write_text("<!DOCTYPE html><html>"),
        "config.json is a web page, not the file itself",
    ),
    "two copies of the weights": (
        stray_single,
        "has both model.safetensors and model.safetensors.index.json with its files, two copies of the weights",
    ),
    "an adapter alone": (adapter_alone, r"holds no config.json: it is an adapter \(PEFT\) without its base model"),
    "GGUF": (gguf_alone, r"holds no config.json: model-Q4_K_M.gguf is made for llama.cpp, and GGUF can't be trained"),
    "a vision model": (config_with(vision_config={"hidden_size": 8}), r"sees or hears \(vision_config\)"),
    "an encoder": (
        config_with(model_type="bert", architectures=["BertForMaskedLM"]),
        r"a bert \(BertForMaskedLM\) is no causal language model.* names a class …ForCausalLM",
    ),
    "no tokenizer": (
        lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        r"holds no tokenizer.json, nor any other tokenizer\. Copy the one of its model",
    ),
    "a slow tokenizer": (
        slow_tokenizer("LlamaTokenizer", "tokenizer.model"),
        r"its tokenizer is a LlamaTokenizer without its fast form \(tokenizer.model, which .* reads\), and "
        r"only fast ones are read. `AutoTokenizer.from_pretrained\(folder\).save_pretrained\(folder\)` writes",
    ),
    "a slow tokenizer of vocab.json": (
        slow_tokenizer("GPT2TokenizerFast", "vocab.json"),
        r"is a GPT2Tokenizer without its fast form \(vocab.json, .* writes tokenizer.json",
    ),
    "a tokenizer that has no fast form": (
        slow_tokenizer("ByT5Tokenizer"),
        r"is a ByT5Tokenizer without its fast form, .* transformers converts no ByT5Tokenizer: take a model with",
    ),
    "a tokenizer of the folder's own code": (
        slow_tokenizer("MyTokenizer", auto_map={"AutoTokenizer": ["tokenization_my.MyTokenizer", None]}),
        r"its tokenizer \(MyTokenizer\) is code of its own, which Muster never runs",
    ),
    "another model's tokenizer": (
        lambda folder: edit_json(
            folder / "tokenizer.json",
            added_tokens=[
                {
                    "id": 500,
                    "content": "<|endoftext|>",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
        ),
        r"its tokenizer has a vocabulary of \d+ tokens, but the model in .* has 288",
    ),
    "a smaller model's tokenizer": (
        config_with(eos_token_id=[270, 280]),
        r"its tokenizer has 259 tokens, but the model in .* ends a text by token 270 \(eos_token_id in config.json\)",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_bad_folder_is_refused_with_the_reason(fault: str, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    spoil, message = WRONG[fault]
    spoil(folder)
    if fault == "another model's tokenizer":
        text = json.loads((folder / "tokenizer.json").read_text())
        text["model"]["vocab"] |= {f"more{n}": 300 + n for n in range(3)}
        (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match=message):
        started(folder)


def test_every_shape_that_contradicts_the_config_is_listed(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    edit_json(folder / "config.json", intermediate_size=56, num_hidden_layers=3, vocab_size=300)
    with pytest.raises(UserError) as refused:
        started(folder)
    listed = [line.strip().partition(":")[0] for line in str(refused.value).splitlines() if line.startswith("  ")]
    parts = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    other = {f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in parts}
    new = {name.replace("layers.1", "layers.2") for name in tensor_names(good) if "layers.1" in name}
    assert set(listed) == other | new | {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(listed) == len(set(listed))


def tensor_names(folder: Path) -> set[str]:
    return set(open_folder(FileStore(folder)).tensors)


def test_the_good_one_starts(good: Path) -> None:
    assert all(bool(parameter.isfinite().all()) for parameter in started(good).parameters())


def test_sequences_within_the_position_limit(good: Path) -> None:
    with pytest.raises(UserError, match=r"sequenceLength 512 is longer than the position limit 256"):
        started(good, data={"train": [{"source": "x"}], "sequenceLength": 512}, batch={"tokensPerStep": 512})


def test_rope_scaling_stretches_the_position_limit(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 256}
    edit_json(folder / "config.json", rope_parameters=yarn)
    row = {"train": [{"source": "x"}], "sequenceLength": 1024}
    started(folder, data=row, batch={"tokensPerStep": 1024})
    with pytest.raises(UserError, match=r"2048 is longer than the position limit 1024 .*rope scaling included"):
        started(folder, data=row | {"sequenceLength": 2048}, batch={"tokensPerStep": 2048})


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["query_proj"], r"'query_proj' matches no layer of this model; did you mean .*q_proj"),
        (
            ["q_proj", "self_attn.q_proj"],
            r"q_proj and self_attn.q_proj both match model.layers.0",
        ),
        (["input_layernorm"], r"'input_layernorm' is no linear layer; an adapter goes beside down_proj, gate_proj"),
    ],
)
def test_adapter_targets_that_do_not_fit(targets: list[str], message: str, good: Path) -> None:
    with pytest.raises(UserError, match=message):
        started(good, adapter={"kind": "lora", "targets": targets})


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("embed_token", r"modulesToSave: 'embed_token' matches no module of this model; did you mean embed_tokens"),
        ("v_proj", r"'v_proj' trains model.layers.0.self_attn.v_proj whole, which adapter.targets has as 'v_proj' too"),
        ("self_attn", r"'self_attn' trains .*self_attn whole, which adapter.targets has as 'v_proj' too"),
    ],
)
def test_modules_to_save_that_do_not_fit(saved: str, message: str, good: Path) -> None:
    with pytest.raises(UserError, match=message):
        started(good, adapter={"targets": ["v_proj"], "modulesToSave": [saved]})


@pytest.mark.parametrize(
    ("family", "saved", "kind"),
    [("qwen2.5", "lm_head", "lora"), ("llama-3.1", "embed_tokens", "dora"), ("llama-2", "mlp", "qlora")],
)
def test_the_size_counts_what_is_trained_whole(family: str, saved: str, kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, family, hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    adapter = Adapter.model_validate({"kind": kind, "targets": ["all-linear"], "modulesToSave": [saved]})
    definition = from_folder(open_folder(FileStore(tmp_path)), adapter)
    learning = [p for p in definition.build(torch.float32, "none").parameters() if p.requires_grad]
    assert definition.size().learning == sum(parameter.numel() for parameter in learning)
    assert {parameter.dtype for parameter in learning} == {torch.float32}


@pytest.mark.parametrize("source", ["ftp://host/model", "model", "s3://", "hf://name"])
def test_what_is_no_address_of_a_folder(source: str) -> None:
    with pytest.raises(ValueError, match=r"model.source|address|names no|nothing reads"):
        training(source)


def test_only_what_is_sliced_is_read(good: Path) -> None:
    """Rows of a tensor, cast on the way; and the CRC of just those bytes."""
    folder = open_folder(FileStore(good))
    name = "model.layers.0.mlp.up_proj.weight"
    read: list[ReadRange] = []
    lazy = LazyTensor(folder, folder.tensors[name], torch.float64, read.append)
    rows = lazy[(slice(7, 19), slice(0, 32))]
    expected = next(t[name] for path in good.glob("*.safetensors") if name in (t := load_file(path)))
    assert torch.equal(rows, expected[7:19].double())
    start = folder.tensors[name].start + 7 * 32 * 4
    assert [(r.start, r.end) for r in read] == [(start, start + 12 * 32 * 4)]


# --- the web and the hub ---


class Hub(http.server.SimpleHTTPRequestHandler):
    """The few answers of a hub that a model's folder needs: what a revision is, and parts of files."""

    folder = Path()
    asked: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        Hub.asked.append((self.path, self.headers.get("Authorization")))
        if match := re.fullmatch(r"/api/models/(?P<name>org/\w+)(?:/revision/(?P<revision>\w+))?", self.path):
            self.answer_about(match["name"], match["revision"])
            return
        path = Hub.folder / self.path.rpartition(f"/{'c' * 40}/")[2].lstrip("/")
        if ("/resolve/" in self.path and f"/resolve/{'c' * 40}/" not in self.path) or not path.exists():
            self.send_error(404)
        else:
            self.send_part(path.read_bytes())

    def answer_about(self, name: str, revision: str | None) -> None:
        if name != "org/tiny" or revision not in (None, "v1"):
            self.send_response(401 if name == "org/gated" else 404)
            code = {"org/tiny": "RevisionNotFound", "org/gated": "GatedRepo"}.get(name, "RepoNotFound")
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        files = [{"rfilename": each.relative_to(Hub.folder).as_posix()} for each in Hub.folder.rglob("*.*")]
        body = json.dumps({"id": name, "modelId": name, "sha": "c" * 40, "siblings": files}).encode()
        self.send_body(200, body)

    def send_part(self, body: bytes) -> None:
        wanted = self.headers.get("Range")
        if wanted is None:
            return self.send_body(200, body)
        first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
        if first >= len(body):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        return self.send_body(206, body[first : last + 1])

    def send_body(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(good: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Hub.folder, Hub.asked = good, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield endpoint
    server.shutdown()
    server.server_close()


def test_further_chat_templates_belong_to_a_folder(hub: str, good: Path) -> None:
    (good / "additional_chat_templates").mkdir(exist_ok=True)
    (good / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    (good / "additional_chat_templates" / "notes.txt").write_text("none")
    for files in (open_files("hf://org/tiny@v1"), FileStore(good)):
        companions = open_folder(files).companions
        assert [name for name in companions if "/" in name] == ["additional_chat_templates/tool_use.jinja"]
        assert template_sources(companions)["tool_use"] == "of tools"


def test_a_revision_of_the_hub_is_resolved_once_and_recorded(hub: str, good: Path) -> None:
    folder: ModelFolder = open_folder(open_files("hf://org/tiny@v1"))
    assert folder.revision == "c" * 40
    definition = from_folder(folder, None)
    model = definition.build(torch.float32, "none")
    definition.fill(model, torch.device("cpu"), 0, values=True)
    described = definition.describe()["source"]
    assert (described["address"], described["revision"]) == ("hf://org/tiny@v1", "c" * 40)
    same = open_folder(FileStore(good))
    plain = from_folder(same, None)
    expected = plain.build(torch.float32, "none")
    plain.fill(expected, torch.device("cpu"), 0, values=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert described["crc32"] == plain.describe()["source"]["crc32"] != {}
    assert all(token == "Bearer hf_secret" for path, token in Hub.asked if "/resolve/" in path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://org/nothing", "the hub has no such model, or shows it to members alone"),
        ("hf://org/tiny@v9", "has no revision 'v9'"),
        ("hf://org/gated", "the model is gated; accept the model's terms"),
        ("hf://datasets/org/tiny", "names datasets, not a model"),
    ],
)
def test_what_the_hub_does_not_give(hub: str, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_files(source)


def test_without_the_network_only_the_cache_counts(hub: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and the cache does not hold it"):
        open_files("hf://org/tiny")
    assert Hub.asked == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_weights_are_numbers_and_infinite_ones_are_not(dtype: torch.dtype) -> None:
    """Also where their sum is none."""
    weights = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(weights)
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(weights.index_fill(0, torch.tensor(17), value)), value
