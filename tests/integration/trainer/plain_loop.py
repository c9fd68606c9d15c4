"""A plain loop over a model of transformers, to compare losses with: torch's AdamW, every document alone in its row."""

from __future__ import annotations

from typing import Any

import torch

from muster.recipe.training import TrainingConfig
from muster.trainer.data import SampleSet
from muster.trainer.train.schedule import learning_rate


def plain_losses(model: Any, config: TrainingConfig, data: SampleSet, steps: int) -> list[float]:
    """The losses of the first steps, per counted token. model: in training mode, with what is frozen set so."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    losses, per_step = [], config.samples_per_step()
    for step in range(1, steps + 1):
        total, scored = torch.zeros(()), 0
        for index in range((step - 1) * per_step, step * per_step):
            sample = data.sample(0, index)
            for document in range(int(sample.documents.max()) + 1):
                chosen = sample.documents == document
                tokens, labels = (torch.tensor(part[chosen]).long() for part in (sample.tokens, sample.labels))
                logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
                total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                scored += int((labels != -100).sum())
        loss = total / scored
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, config.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, config.length.steps)  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
