"""The sides of train.py: one rank of one of them. Not to be started by hand."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
RANK, ALPHA = 16, 32
STEPS = 1_000_000  # the parent says when it is enough


class Gate:
    """Lets the side train as many steps as the parent asks for, and tells it what each took."""

    def __init__(self, descriptor: int) -> None:
        self._out = os.fdopen(descriptor, "w", buffering=1)
        self._steps: list[tuple[float, float, int, float]] = []
        self._left = 0
        self._began = self._worked = 0.0
        self.libraries = 0  # resident bytes when all libraries are loaded and nothing else is

    def open(self) -> None:
        """To be called before the first step."""
        self._tell("ready")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._wait()

    def finished(self, tokens: int, loss: float, settle: Callable[[list[Any]], list[Any]] = list) -> None:
        """To be called after each step, with the tokens of all ranks. `settle` may correct a block that is told."""
        now, work = time.perf_counter(), time.process_time()
        self._steps.append((now - self._began, work - self._worked, tokens, loss))
        self._left -= 1
        if self._left == 0:
            self._tell(settle(self._steps))
            self._wait()
        self._began, self._worked = time.perf_counter(), time.process_time()

    def _wait(self) -> None:
        order = sys.stdin.readline().strip()
        if order in ("", "end"):
            import psutil

            helpers = sum(child.memory_full_info().pss for child in psutil.Process().children(recursive=True))
            self._tell({"peak": _status("VmHWM") + helpers, "helpers": helpers, "libraries": self.libraries})
            os._exit(0)
        self._steps, self._left = [], int(order)
        self._began, self._worked = time.perf_counter(), time.process_time()

    def _tell(self, what: Any) -> None:
        self._out.write(json.dumps(what) + "\n")


def _status(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def main() -> None:
    order, gate = json.loads(sys.argv[1]), Gate(int(sys.argv[2]))
    side, method = order["side"], order["method"]
    os.environ |= {
        "MUSTER_JOB_UID": "train",
        "MUSTER_CONFIG": json.dumps({"training": _config(order), "checkpoint": {"every": STEPS}}),
        "MUSTER_CHECKPOINT_URI": f"file://{Path.cwd()}/checkpoints",
        "MUSTER_WORKER_DIR": str(Path.cwd()),
        "MUSTER_CACHE_DIR": str(Path(order["corpus"]).parent / "cache"),
    }
    if side == "preparation":
        _data()
        gate.open()
    elif side.startswith("muster"):
        _muster(gate, order, decoder="decoder" in side)
    elif side == "bare FSDP2":
        _bare(gate, order)
    elif side == "transformers.Trainer":
        _trainer(gate, order, method)
    elif order["task"] == "dpo":
        _trl_dpo(gate, order, method, sharded=side.endswith("fsdp"))
    else:
        _trl(gate, order, method)


def _config(order: dict[str, Any]) -> dict[str, Any]:
    kind = {"full": None, "lora": "lora", "qlora": "qlora"}[order["method"]]
    length, rows = order["sequence_length"], order["micro_batch"] * order["ranks"]
    return {
        "task": order["task"],
        "model": {"source": Path(order["model"]).as_uri()},
        **({"adapter": {"kind": kind, "rank": RANK, "alpha": ALPHA, "targets": ["all-linear"]}} if kind else {}),
        "data": {"train": [{"source": order["corpus"]}], "sequenceLength": length},
        "optimizer": {"lr": RATE, "betas": BETAS, "weightDecay": DECAY, "clipNorm": CLIP, "schedule": _CONSTANT},
        "batch": {"tokensPerStep": length * rows, "microBatch": order["micro_batch"]},
        "parallel": {
            "shard": "ddp" if order["side"].endswith("ddp") else "fsdp",
            "activationCheckpointing": order["recompute"],
        },
        "length": {"steps": STEPS},
        "precision": "fp32",
    }


_CONSTANT = {"name": "constant", "warmupSteps": 0}


# --- Muster ---


def _muster(gate: Gate, order: dict[str, Any], decoder: bool) -> None:
    from muster.trainer.config import read_ranks, read_run
    from muster.trainer.data import open_data
    from muster.trainer.launch.process_control import process_started_at
    from muster.trainer.models import sharding
    from muster.trainer.parallel.groups import connect
    from muster.trainer.train import loop
    from muster.trainer.train.origin import RunOrigin, find_origin
    from muster.trainer.train.rank_state import RankState
    from muster.words.signals import TrainerPhase

    gate.libraries = _import_transformers(order["method"], peers=False)
    run, ranks = read_run(), read_ranks()
    device = sharding.choose_device(ranks)
    connect(device)
    origin = find_origin(run, print)
    if decoder:
        origin = RunOrigin(_as_decoder(order["model"], run.training.adapter), origin.tokenizer)
    data = open_data(run.training, origin.tokenizer, run.cache_dir, lambda line: None)
    rank_state = RankState(run.worker_dir, run.attempt, ranks.rank, process_started_at())
    rank_state.heartbeats.start()
    layout = sharding.plan(origin.model, run.training, ranks, sharding.capacity(device, ranks), device)
    trainer = loop.RankTrainer(run, ranks, rank_state, origin, data, device, layout)
    trainer.load()
    if decoder:
        _copy_weights(order["model"], trainer.step.model.module)
    rank_state.activity.enter(TrainerPhase.STEP)
    loader, told = trainer.open_loader(), []
    publish = trainer.reporter.publish
    trainer.reporter.publish = lambda record: (told.append(record), publish(record))  # type: ignore[method-assign]
    before = trainer.progress.tokens
    gate.open()
    while True:
        trainer.advance(loader)
        gate.finished(trainer.progress.tokens - before, told.pop().loss)
        before = trainer.progress.tokens


def _as_decoder(folder: str, adapter: Any) -> Any:
    """The folder's shape as our own decoder's."""
    from muster.recipe.architecture import Architecture
    from muster.trainer.models.decoder_model import DecoderModel
    from muster.words.base import parse

    config = json.loads((Path(folder) / "config.json").read_text())
    shape = {
        "dim": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kvHeads": config["num_key_value_heads"],
        "ffnDim": config["intermediate_size"],
        "vocabSize": config["vocab_size"],
        "maxPositions": config["max_position_embeddings"],
        "normEps": config["rms_norm_eps"],
        "ropeTheta": config["rope_parameters"]["rope_theta"],
        "tiedHead": config["tie_word_embeddings"],
    }
    return DecoderModel(parse(Architecture, shape), adapter)


def _copy_weights(folder: str, model: Any) -> None:
    import torch
    from safetensors.torch import load_file

    from muster.trainer.parallel.shards import local_rows

    theirs = load_file(Path(folder) / "model.safetensors")
    names = {
        "embed.": "model.embed_tokens.",
        "norm.": "model.norm.",
        "layers.": "model.layers.",
        ".attention_norm.": ".input_layernorm.",
        ".feed_forward_norm.": ".post_attention_layernorm.",
        ".attention.": ".self_attn.",
        ".feed_forward.": ".mlp.",
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                continue
            found = name
            for ours, public in names.items():
                found = public + found[len(ours) :] if found.startswith(ours) else found
                found = found.replace(ours, public) if ours.startswith(".") else found
            rows, first = local_rows(parameter)
            rows.copy_(theirs[found][first : first + len(rows)])


# --- a bare loop ---


def _bare(gate: Gate, order: dict[str, Any]) -> None:
    """FSDP2, AdamW, clipping by torch's own function: what a person writes who wants nothing but the training."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    gate.libraries = _import_transformers(order["method"])
    dist.init_process_group("gloo")
    model = _model(order)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner = model.get_base_model() if order["method"] == "lora" else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order["recompute"] == "full":
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)
    loader = _loader(order)

    def settle(steps: list[Any]) -> list[Any]:
        """Means over the ranks instead of rank 0's own figures."""
        sums = torch.tensor([step[2:] for step in steps], dtype=torch.float64)
        dist.all_reduce(sums)
        means = zip(steps, sums.tolist(), strict=True)
        return [(*step[:2], int(tokens), loss / dist.get_world_size()) for step, (tokens, loss) in means]

    gate.open()
    while True:
        batch = loader.next()
        (micro,) = batch.micro
        given = {"input_ids": micro.tokens, "position_ids": micro.positions, "use_cache": False}
        optimizer.zero_grad()
        loss = model(**given, labels=micro.labels, shift_labels=micro.labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        print(loss.item(), flush=True)
        gate.finished(batch.tokens, loss.item(), settle)


def _data() -> Any:
    from muster.trainer.config import read_run
    from muster.trainer.data import open_data
    from muster.trainer.train.origin import find_origin

    run = read_run()
    return run, open_data(run.training, find_origin(run, print).tokenizer, run.cache_dir, lambda line: None).train


def _loader(order: dict[str, Any]) -> Any:
    import torch

    from muster.trainer.config import data_parallel, read_ranks
    from muster.trainer.data import RankLoader
    from muster.words.checkpoint import DataCursor

    run, data = _data()
    cursor, division = DataCursor(seed=run.training.seed, epoch=0, sample=0), data_parallel(run.training, read_ranks())
    rows = run.training.samples_per_step()
    return RankLoader(data, cursor, rows, order["micro_batch"], division, torch.device("cpu"))


# --- transformers and TRL ---


def _import_transformers(method: str, peers: bool = True) -> int:
    """Returns the resident bytes with all of it loaded, peers' own libraries too where they are wanted."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    if peers:
        from transformers import Trainer  # noqa: F401
    if peers and method != "full":
        import peft  # noqa: F401
    if method == "qlora":
        import bitsandbytes  # noqa: F401
    return _status("VmRSS")


def _model(order: dict[str, Any], with_adapter: bool = True) -> Any:
    """The folder's model, as the method wants it."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if order["method"] == "qlora":
        four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        options = {"quantization_config": BitsAndBytesConfig(**four_bits), "device_map": {"": "cpu"}}
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32, **options)
    if order["method"] == "full" or not with_adapter:
        return model
    from peft import get_peft_model, prepare_model_for_kbit_training

    if order["method"] == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, _adapter())


def _adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def _arguments(order: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": str(Path.cwd() / "output"),
        "max_steps": STEPS,
        "per_device_train_batch_size": order["micro_batch"],
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": DECAY,
        "max_grad_norm": CLIP,
        "gradient_checkpointing": order["recompute"] == "full",
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "dataloader_num_workers": 0,
    }


def _clock(gate: Gate, tokens: list[int], ranks: int) -> Any:
    """From log to log: everything that a step costs, data included."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        done = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            tokens.clear()  # of what was collated for the reference
            gate.open()

        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            gate.finished(tokens[self.done] * ranks, float(logs["loss"]))
            self.done += 1

    return Clock()


def _trainer(gate: Gate, order: dict[str, Any], method: str) -> None:
    gate.libraries = _import_transformers(method)
    import torch
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    _, data = _data()
    tokens: list[int] = []

    class Rows(torch.utils.data.Dataset[Any]):
        """The rows that Muster trains on, in its order."""

        def __len__(self) -> int:
            return int(data.samples_per_epoch)

        def __getitem__(self, index: int) -> Any:
            return data.sample(0, index)

    def collate(samples: list[Any]) -> dict[str, Any]:
        tokens.append(sum(int((sample.documents >= 0).sum()) for sample in samples))

        def stacked(name: str) -> Any:
            return torch.stack([torch.as_tensor(getattr(sample, name)).long() for sample in samples])

        labels = stacked("labels")
        shape = {"input_ids": stacked("tokens"), "position_ids": stacked("positions")}
        return {**shape, "labels": labels, "shift_labels": labels}

    arguments = TrainingArguments(
        **_arguments(order), remove_unused_columns=False, train_sampling_strategy="sequential"
    )
    clock = _clock(gate, tokens, order["ranks"])
    Trainer(model=_model(order), args=arguments, train_dataset=Rows(), data_collator=collate, callbacks=[clock]).train()


def _trl(gate: Gate, order: dict[str, Any], method: str) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from transformers.utils import logging
    from trl import SFTConfig, SFTTrainer

    gate.libraries = _import_transformers(method)
    logging.set_verbosity_error()
    tokens: list[int] = []
    arguments = SFTConfig(
        **_arguments(order), packing=True, max_length=order["sequence_length"], dataset_text_field="text"
    )
    trainer = SFTTrainer(
        model=_model(order, with_adapter=False),
        args=arguments,
        train_dataset=load_dataset("json", data_files=order["corpus"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(order["model"]),
        peft_config=None if method == "full" else _adapter(),
        callbacks=[_clock(gate, tokens, order["ranks"])],
    )
    collate = trainer.data_collator

    def counted(samples: list[Any]) -> Any:
        tokens.append(sum(len(sample["input_ids"]) for sample in samples))
        return collate(samples)

    trainer.data_collator = counted
    trainer.train()


def _let_accelerate_shard_on_a_cpu() -> None:
    """accelerate takes an FSDP plugin on every kind of accelerator and drops it on a CPU, where FSDP2 works as well."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    plain = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = with_plugin


def _trl_dpo(gate: Gate, order: dict[str, Any], method: str, sharded: bool) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from transformers.utils import logging
    from trl import DPOConfig, DPOTrainer

    gate.libraries = _import_transformers(method)
    logging.set_verbosity_error()
    tokens: list[int] = []
    whole, sharding = method == "full", {}
    if sharded:
        _let_accelerate_shard_on_a_cpu()
        sharding = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
    arguments = DPOConfig(
        **_arguments(order), **sharding, max_length=order["sequence_length"], precompute_ref_log_probs=whole
    )
    trainer = DPOTrainer(
        model=_model(order, with_adapter=False),
        args=arguments,
        train_dataset=load_dataset("json", data_files=order["corpus"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(order["model"]),
        peft_config=None if whole else _adapter(),
        callbacks=[_clock(gate, tokens, order["ranks"])],
    )
    collate = trainer.data_collator

    def counted(samples: list[Any]) -> Any:
        batch = collate(samples)
        tokens.append(int(batch["attention_mask"].sum()))
        return batch

    trainer.data_collator = counted
    trainer.train()


if __name__ == "__main__":
    main()
