"""A small language model of Transformers, in float64."""

from __future__ import annotations

from typing import Any

import torch


def small_language() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=7, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return GPT2LMHeadModel(config).double()
