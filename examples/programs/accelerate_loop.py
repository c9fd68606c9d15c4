"""A loop of Hugging Face's Accelerate: a byte model learns a text, and the whole state is saved as folders."""

import hashlib
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, WIDTH, OUT = int(os.environ.get("STEPS", "60")), 8, Path("out")

accelerator = Accelerator(cpu=True)
set_seed(1)
text = torch.tensor(list(Path(os.__file__).read_bytes())[:20_000])
rows = text[: len(text) // (WIDTH + 1) * (WIDTH + 1)].view(-1, WIDTH + 1)
model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * WIDTH, 64), nn.GELU(), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(rows[:, :WIDTH], rows[:, WIDTH]), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

first = 1
if saved := sorted(OUT.glob("step-*")):
    accelerator.load_state(str(saved[-1]))
    first = int(saved[-1].name.split("-")[1]) + 1

passed = (first - 1) % len(loader)  # of the epoch
batches = iter(accelerator.skip_first_batches(loader, passed))
for step in range(first, STEPS + 1):
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader)
        batch = next(batches)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        accelerator.save_state(str(OUT / f".step-{step:06d}"))
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process:  # a folder under its final name is complete
            (OUT / f".step-{step:06d}").rename(OUT / f"step-{step:06d}")

weights = b"".join(p.detach().numpy().tobytes() for p in accelerator.unwrap_model(model).parameters())
if accelerator.is_main_process:
    print(f"step {STEPS}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
accelerator.end_training()
