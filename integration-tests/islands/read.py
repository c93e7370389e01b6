"""Exports of a language model that ranks of FSDP2 read, each its own shards."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from idioms.small_language import small_language
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import fully_shard
from transformers import GPT2LMHeadModel  # noqa: F401  # once, before ranks are forked


def main(folder: Path, names: list[str]) -> None:
    """Read `FOLDER/NAME/dcp` of each name, and leave the whole model in `FOLDER/NAME/RANKS.pt`."""
    warnings.simplefilter("ignore")
    for name in names:
        model = small_language()
        for layer in (*model.transformer.h, model):
            fully_shard(layer)
        state = {"model": get_model_state_dict(model)}
        load(state, checkpoint_id=folder / name / "dcp")
        set_model_state_dict(model, state["model"])
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if distributed.get_rank() == 0:
            torch.save(whole, folder / name / f"{distributed.get_world_size()}.pt")
