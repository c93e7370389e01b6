"""A GPT-2 with LoRA in a LightningModule: adapters alone are sent, and a resumed run is the uninterrupted one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from nets import flat, on_ranks, trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(None in map(find_spec, ("peft", "transformers")), reason="PEFT is not installed"),
]


class Adapted(lightning.LightningModule):
    """A tiny GPT-2 whose adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
        whole = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        adapters = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.1)
        self.net = get_peft_model(whole, adapters)
        self.sent = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-2)

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.sent = strategy.session.counters.bytes_sent


def fit(folder: Path, ckpt: Path | None = None) -> Adapted:
    net = Adapted()
    kept = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    one = trainer("diloco", "parameters.0.every=4", callbacks=[kept], enable_checkpointing=True)
    tokens = torch.randint(64, (48, 12), generator=torch.Generator().manual_seed(0))
    one.fit(net, DataLoader(TensorDataset(tokens), 4, shuffle=True), ckpt_path=ckpt)
    return net


def test_adapters_alone_are_sent_and_a_run_goes_on(tmp_path: Path) -> None:
    """Saved after 6 steps, in the middle of a period."""
    whole = on_ranks(lambda: fit(tmp_path / "whole"))
    again = on_ranks(lambda: fit(tmp_path / "again", tmp_path / "whole" / "epoch=0.ckpt"))
    assert all(torch.equal(flat(one), flat(other)) for one, other in zip(whole, again, strict=True))
    adapters = sum(p.numel() for p in whole[0].parameters() if p.requires_grad)
    # Three outer steps of two ranks send each value once; each has few bytes besides.
    assert 3 * 4 * adapters <= whole[0].sent <= 3 * 4 * adapters + 1000
    assert 10 * adapters < flat(whole[0]).numel()
