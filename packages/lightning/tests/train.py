"""A script of a user's, which launchers start; each rank writes its parameters to a file."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from nets import BATCH, Net, flat, samples

from hocket_lightning import HocketStrategy

torch.set_num_threads(1)
folder, *strategy = sys.argv[1:]
trainer = lightning.Trainer(
    strategy=HocketStrategy(*strategy),
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    default_root_dir=folder,
    callbacks=[ModelCheckpoint(save_last=True)],
    enable_progress_bar=False,
)
net = Net()
trainer.fit(net, DataLoader(samples(), BATCH, shuffle=True), DataLoader(samples(8), BATCH))
torch.save(flat(net), Path(folder) / f"rank-{trainer.global_rank}-of-{trainer.world_size}.pt")
