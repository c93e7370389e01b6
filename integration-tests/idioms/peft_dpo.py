"""DPO by PEFT: the reference is the same model with its adapter switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from idioms.batches import tokens
from idioms.side import Side, Told
from idioms.small_language import small_language

NEEDS = ("peft", "transformers")


def log_p(model: torch.nn.Module, words: Tensor) -> Tensor:
    likely = model(input_ids=words[:, :-1]).logits.log_softmax(-1)
    summed: Tensor = likely.gather(2, words[:, 1:, None])[..., 0].sum(1)
    return summed


def train(side: Side) -> Told:
    model = get_peft_model(small_language(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0))
    model.double()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
    session = side.attach(model, optimizer)
    for step in side.steps(5):
        both = torch.cat([side.share(tokens(step)), side.share(tokens(100 + step))])
        session.settle()
        with torch.no_grad(), model.disable_adapter():
            wanted, unwanted = log_p(model, both).chunk(2)
        likely, unlikely = log_p(model, both).chunk(2)
        optimizer.zero_grad()
        (-F.logsigmoid(0.5 * ((likely - wanted) - (unlikely - unwanted))).mean()).backward()
        optimizer.step()
    return {}
