"""Lightning's Trainer: a byte model learns a text, with its own checkpoints."""

import hashlib
import os
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

STEPS, ROWS, WIDTH, OUT = int(os.environ.get("STEPS", "60")), 16, 8, Path("out")


class Bytes(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * WIDTH, 64), nn.Linear(64, 256))
        self.text = torch.tensor(list(Path(os.__file__).read_bytes()))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        # Drawn by the step, for Lightning begins the epoch's data anew when it resumes within one.
        draw = torch.Generator().manual_seed(self.global_step)
        at = torch.randint(len(self.text) - WIDTH, (ROWS * self.trainer.world_size,), generator=draw)
        at = at[self.global_rank :: self.trainer.world_size]
        return F.cross_entropy(self.net(torch.stack([self.text[i : i + WIDTH] for i in at])), self.text[at + WIDTH])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(1)
model = Bytes()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    strategy="ddp",
    max_steps=STEPS,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[ModelCheckpoint(OUT, "{step}", every_n_train_steps=10, save_top_k=1, enable_version_counter=False)],
)
saved = sorted(OUT.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
trainer.fit(model, DataLoader(range(1_000)), ckpt_path=saved[-1] if saved else None)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if trainer.is_global_zero:
    print(f"step {trainer.global_step}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
