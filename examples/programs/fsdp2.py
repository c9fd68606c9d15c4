"""FSDP2 with checkpoints of torch.distributed.checkpoint: a byte model learns a text, its parameters sharded."""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, ROWS, WIDTH, OUT = int(os.environ.get("STEPS", "60")), 16, 8, Path("out")

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * WIDTH, 64), nn.GELU(), nn.Linear(64, 256))
mesh = init_device_mesh("cpu", (world,))
for layer in (model[2], model[4], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.tensor(list(Path(os.__file__).read_bytes()))

first = 1
if saved := sorted(OUT.glob("step-*/.metadata")):
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first = int(saved[-1].parent.name.split("-")[1]) + 1

for step in range(first, STEPS + 1):
    draw = torch.Generator().manual_seed(step)
    at = torch.randint(len(text) - WIDTH, (ROWS * world,), generator=draw)[rank::world]
    loss = F.cross_entropy(model(torch.stack([text[i : i + WIDTH] for i in at])), text[at + WIDTH])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=OUT / f"step-{step:06d}")

whole = [parameter.full_tensor().detach().numpy().tobytes() for parameter in model.parameters()]
if rank == 0:
    print(f"step {STEPS}: weights {hashlib.sha256(b''.join(whole)).hexdigest()[:16]}", flush=True)
dist.destroy_process_group()
