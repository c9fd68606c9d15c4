"""A program of Hugging Face's Trainer: a small Llama of random weights learns a text."""

import hashlib
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

STEPS = int(os.environ.get("STEPS", "20"))

torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
text = torch.tensor(list(Path(os.__file__).read_bytes())[:20_000])
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // 32 * 32].view(-1, 32)]
arguments = TrainingArguments(
    output_dir="out",
    max_steps=STEPS,
    save_steps=5,
    logging_steps=1,
    per_device_train_batch_size=4,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=rows,
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
print(f"step {trainer.state.global_step}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
