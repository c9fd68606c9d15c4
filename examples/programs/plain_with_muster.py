"""A plain training loop: a byte model learns a text, with DistributedDataParallel."""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from muster import run

STEPS, ROWS, WIDTH = int(os.environ.get("STEPS", "60")), 16, 8

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * WIDTH, 64), nn.GELU(), nn.Linear(64, 256))
net = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.tensor(list(Path(os.__file__).read_bytes()))

first = 1
if run.resume_dir():
    state = torch.load(f"{run.resume_dir()}/state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1

for step in range(first, STEPS + 1):
    draw = torch.Generator().manual_seed(step)
    at = torch.randint(len(text) - WIDTH, (ROWS * world,), generator=draw)[rank::world]
    loss = F.cross_entropy(net(torch.stack([text[i : i + WIDTH] for i in at])), text[at + WIDTH])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    run.step(step, loss=loss, steps=STEPS)
    if (stop := run.should_stop()) or step % 10 == 0:
        with run.checkpoint(step) as folder:
            if rank == 0:
                torch.save(state, folder / "state.pt")
    if stop:
        break

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
if rank == 0:
    print(f"step {STEPS}: weights {digest}", flush=True)
dist.destroy_process_group()
