"""LoRA by PEFT on a model of Transformers, whose own parameters are frozen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from idioms.batches import tokens
from idioms.side import Side, Told
from idioms.small_language import small_language

NEEDS = ("peft", "transformers")


def train(side: Side) -> Told:
    model = get_peft_model(small_language(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0))
    model.double()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
    side.attach(model, optimizer)
    for step in side.steps(5):
        words = side.share(tokens(step))
        optimizer.zero_grad()
        logits: Tensor = model(input_ids=words[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()
    return {}
