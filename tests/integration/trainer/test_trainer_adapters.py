"""Adapters beside a model of transformers in bf16: the losses of `peft` in a plain loop, under ddp and fsdp, and
exports that `peft` and transformers open."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.gangs import Job, Part, samples, train_many, training, write_corpus
from tests.integration.trainer.plain_loop import plain_losses
from tests.model_families import write_model

from muster.recipe.training import TrainingConfig
from muster.storage.file_store import FileStore
from muster.storage.model_folder import open_folder
from muster.trainer.convert import peft
from muster.trainer.convert.export import export
from muster.trainer.convert.load_model import of_commit
from muster.trainer.data import load_tokenizer, open_data
from muster.trainer.models.transformers_model import from_folder
from muster.words.base import parse
from muster.words.names import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS, SEED = 20, 3
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 3, "alpha": 6.0, "targets": ["q_proj", "self_attn.v_proj", "down_proj"]},
    "rslora": {"kind": "rslora", "rank": 4, "alpha": 4.0, "targets": ["all-linear"]},
    "dora": {"kind": "dora", "rank": 2, "alpha": 8.0, "targets": ["k_proj", "gate_proj"]},
    "saving": {"kind": "lora", "rank": 2, "targets": ["q_proj", "up_proj"], "modulesToSave": ["embed_tokens"]},
    "qlora": {"kind": "qlora", "rank": 4, "alpha": 8.0, "targets": ["all-linear"]},
}


@dataclass(frozen=True)
class Trained:
    """jobs: by kind and sharding; and by kind those that were stopped and went on."""

    root: Path
    jobs: dict[tuple[str, str], Job]
    stopped: dict[str, Job]

    @property
    def model(self) -> Path:
        return self.root / "model"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("adapters")
    source = write_corpus(root / "corpus")
    write_model(root / "model", "qwen2.5", dtype=torch.bfloat16, hidden_size=64, intermediate_size=128)
    jobs = {}
    for kind, shard in product(KINDS, ("ddp", "fsdp")):
        document = training(
            source,
            model={"source": (root / "model").as_uri()},
            adapter=KINDS[kind],
            batch={"tokensPerStep": 256, "microBatch": 2},
            optimizer={"lr": 1e-2, "schedule": {"warmupSteps": 3}},
            length={"steps": STEPS},
            parallel={"shard": shard},
            deterministic=True,
        )
        jobs[kind, shard] = Job(root / f"{kind}-{shard}", document, uid=f"{kind}-{shard}")
    stopped = {k: Job(root / f"{k}-stopped", jobs[k, "fsdp"].training, uid=f"{k}-stopped") for k in ("dora", "qlora")}
    parts = [part for job in stopped.values() for part in (Part(job, 1, 0, stop_after=6), Part(job, 2, 6))]
    expected = [ExitCode.DONE] * len(jobs) + [ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE] * len(stopped)
    assert train_many(root / "two", 2, [*map(Part, jobs.values()), *parts]) == expected
    return Trained(root, jobs, stopped)


def test_losses_are_those_of_peft_in_a_plain_loop(trained: Trained) -> None:
    for kind in {kind for kind, _ in trained.jobs}:
        job = trained.jobs[kind, "fsdp"]
        config = parse(TrainingConfig, job.training, "training")
        tokenizer = load_tokenizer(str(trained.model / "tokenizer.json"))
        data = open_data(config, tokenizer, job.root / "cache", lambda line: None)
        expected = plain_losses(peft_model(config, trained.model), config, data.train, STEPS)
        for shard in ("ddp", "fsdp"):
            if (kind, shard) in trained.jobs:
                losses = [r.loss for r in trained.jobs[kind, shard].steps(1)]
                assert losses == pytest.approx(expected, abs=1e-4 if kind == "qlora" else 1e-5), (kind, shard)
        assert expected[-1] < expected[0] - 0.05


def peft_model(config: TrainingConfig, folder: Path) -> Any:
    """peft's own adapter on transformers' own model, beginning with the values that ours begins with."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapter = config.adapter
    assert adapter is not None
    targets: Any = "all-linear" if adapter.targets == ("all-linear",) else list(adapter.targets)
    about = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=targets,
        target_parameters=list(adapter.target_parameters) or None,
        use_rslora=adapter.kind == "rslora",
        use_dora=adapter.kind == "dora",
        modules_to_save=list(adapter.modules_to_save) or None,
        ensure_weight_tying=bool(adapter.modules_to_save),  # of this model embedding and head are one weight
    )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **in_four_bits(adapter.kind))
    theirs = get_peft_model(base, about).train()
    definition = from_folder(open_folder(FileStore(folder)), adapter)
    ours = definition.build(torch.float32, "none")
    definition.fill(ours, torch.device("cpu"), SEED, values=True)
    values, own = dict(theirs.named_parameters()), dict(ours.named_parameters())
    with torch.no_grad():
        for name, their in peft.names([n for n in own if ".lora_A." in n], True, own).items():
            values[their.replace("lora_A.", "lora_A.default.")].copy_(own[name])
    return theirs


def in_four_bits(kind: str) -> dict[str, Any]:
    """What from_pretrained is told for a base as QLoRA has it: all linear layers but the head in bitsandbytes' NF4."""
    from transformers import BitsAndBytesConfig

    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return {"quantization_config": BitsAndBytesConfig(**nf4), "device_map": "cpu"} if kind == "qlora" else {}


def test_a_stopped_job_goes_on_bit_for_bit(trained: Trained) -> None:
    for kind, job in trained.stopped.items():
        calm = trained.jobs[kind, "fsdp"].steps(1)
        seen, expected = ([(r.step, r.loss, r.grad_norm) for r in each] for each in (job.steps(1, 2), calm))
        assert seen == expected, kind


def test_frozen_weights_keep_the_dtype_that_they_came_in(trained: Trained) -> None:
    tensors = trained.jobs["dora", "fsdp"].commit(STEPS)["tensors"]
    dtypes = {name.rpartition(".lora_")[1] or "frozen": entry["dtype"] for name, entry in tensors.items()}
    assert dtypes == {"frozen": "BF16", ".lora_": "F32"}


def test_a_commit_holds_linear_layers_in_four_bits_in_files_written_once(trained: Trained) -> None:
    job = trained.stopped["qlora"]
    commit = job.commit(STEPS)
    held = {name: entry["dtype"] for name, entry in commit["tensors"].items() if "layers.0.mlp.up_proj" in name}
    assert held.pop("model/model.layers.0.mlp.up_proj.weight_nf4") == "U8"
    assert held.pop("model/model.layers.0.mlp.up_proj.weight_absmax") == "U8"
    assert all(".lora_" in name for name in held)
    assert commit["tensors"]["model/model.embed_tokens.weight"]["dtype"] == "BF16"
    frozen = [file["key"] for file in commit["files"] if "/frozen-" in file["key"]]
    assert [key.partition("/")[0] for key in frozen] == ["step-00000006"] * 2
    assert sorted(str(path.relative_to(job.folder)) for path in job.folder.rglob("frozen-*")) == sorted(frozen)


def test_four_bits_are_sharded_anew_with_every_sample_once(trained: Trained, tmp_path: Path) -> None:
    calm = trained.jobs["qlora", "fsdp"]
    job = Job(tmp_path, calm.training, uid="moved")
    assert train_many(tmp_path / "two", 2, [Part(job, 1, 0, stop_after=6)]) == [ExitCode.PREEMPTED_COMMITTED]
    assert train_many(tmp_path / "one", 1, [Part(job, 2, 6, stop_after=12)]) == [ExitCode.PREEMPTED_COMMITTED]
    assert train_many(tmp_path / "again", 2, [Part(job, 3, 12)]) == [ExitCode.DONE]
    losses = [record.loss for record in job.steps(1, 2, 3)]
    assert losses == pytest.approx([record.loss for record in calm.steps(1)], abs=1e-5)
    seen = [samples(job, attempt, ranks, 2) for attempt, ranks in ((1, 2), (2, 1), (3, 2))]
    assert {step: ids for part in seen for step, ids in part.items()} == samples(calm, 1, 2, 2)


def test_exports_open_in_peft_and_merged_in_transformers(trained: Trained, tmp_path: Path) -> None:
    for kind in {kind for kind, _ in trained.jobs}:
        open_exports(trained.jobs[kind, "fsdp"], kind, tmp_path / kind)


def open_exports(job: Job, kind: str, folder: Path, apart: float = 5e-2) -> None:
    """`apart`: how far the merged model may be from peft's; by default, as far as weights in bf16 let it be."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    store = FileStore(job.folder)
    assert export(store, STEPS, folder / "alone", form="peft")["adapter"] == "alone"
    assert export(store, STEPS, folder / "merged")["adapter"] == "merged"
    beside = AutoPeftModelForCausalLM.from_pretrained(folder / "alone", dtype=torch.float32, **in_four_bits(kind))
    # On some CPUs bitsandbytes computes in bf16 where it evaluates; there is no dropout to be left out.
    beside = beside.train() if kind == "qlora" else beside.eval()
    tokens = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = beside(input_ids=tokens, use_cache=False).logits
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
        assert (merged(input_ids=tokens, use_cache=False).logits - expected).abs().max() <= apart
        ours = of_commit(job.folder.as_uri(), STEPS).module
        exact = ours(tokens, torch.arange(24).expand(2, 24), torch.zeros_like(tokens))
    assert (exact - expected).abs().max() <= 1e-5
