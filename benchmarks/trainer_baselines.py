"""The other sides of trainer_overhead.py: a bare FSDP2 loop over the same model and data, and transformers.Trainer.

The bare loop is what a person would write who wants nothing but the training: no heartbeats, no metrics, no record, no
stop signal, no token weighting, no check of the numbers. It prints the loss, as everybody does.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from muster.contract.architecture import Architecture
from muster.contract.training import TrainingConfig
from muster.trainer.config import Ranks
from muster.trainer.data import Dataset, Loader
from muster.trainer.models.decoder import build
from muster.trainer.train.tasks.next_token import NextToken


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Muster's samples of the first epoch as transformers.Trainer reads them; it shifts the labels itself."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return self.dataset.samples_per_epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.as_tensor(self.dataset.sample(0, index).tokens).long()
        return {"input_ids": tokens, "labels": tokens}


class BareLoop:
    """FSDP2, AdamW, clipping by torch's own function."""

    def __init__(self, architecture: Architecture, training: TrainingConfig, ranks: Ranks, loader: Loader) -> None:
        mesh = init_device_mesh("cpu", (ranks.world,))
        self.model = build(architecture)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=training.optimizer.lr, betas=training.optimizer.betas, fused=True
        )
        self.objective, self.loader = NextToken(), loader

    def step(self) -> None:
        batch = self.loader.next()
        self.optimizer.zero_grad()
        for number, micro in enumerate(batch.micro, start=1):
            self.model.set_requires_gradient_sync(number == len(batch.micro))  # type: ignore[operator]
            losses = self.objective.loss(self.model, micro)
            loss = losses.sum / losses.count / len(batch.micro)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        print(loss.item(), flush=True)


def hugging_face_steps(
    architecture: Architecture, training: TrainingConfig, samples: Any, steps: int
) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each step of transformers.Trainer: same shape, batch and optimizer, DDP."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    a = architecture
    model = LlamaForCausalLM(
        LlamaConfig(  # type: ignore[call-arg]
            vocab_size=a.vocab_size,
            hidden_size=a.dim,
            intermediate_size=a.ffn_dim,
            num_hidden_layers=a.layers,
            num_attention_heads=a.heads,
            num_key_value_heads=a.kv_heads,
            max_position_embeddings=a.max_positions,
            tie_word_embeddings=a.tied_head,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    costs: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        began, worked = time.perf_counter(), time.process_time()

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            """From log to log: everything that a step costs, data included."""
            now, work = time.perf_counter(), time.process_time()
            costs.append((now - self.began, work - self.worked))
            self.began, self.worked = now, work

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=str(Path(folder)),
            max_steps=steps,
            per_device_train_batch_size=training.batch.micro_batch,
            gradient_accumulation_steps=training.accumulation(ranks),
            learning_rate=training.optimizer.lr,
            optim="adamw_torch_fused",
            adam_beta2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            dataloader_num_workers=0,
        )
        Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[Clock()]).train()
    return costs[:steps]  # the last log is of the whole run
