"""Hocket for Hugging Face: Transformers' Trainer, TRL's trainers, and Accelerate's loops.

    from hocket_transformers import HocketTrainer
    HocketTrainer(model, args, train_dataset=dataset, hocket="diloco").train()

Import it before `TrainingArguments` or `Accelerator` are made: it names the ranks to Accelerate, whichever launcher has
started them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import hocket

if TYPE_CHECKING:
    from hocket_transformers.local_sgd import exchanging
    from hocket_transformers.trainer import HocketTrainer

__all__ = ["HocketTrainer", "exchanging"]

# A process that a rank has started has these variables as well, and is no rank.
if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
    hocket.join(torch_variables=True)


def __getattr__(name: str) -> Any:
    # A loop of Accelerate's needs no Transformers.
    if name == "HocketTrainer":
        from hocket_transformers.trainer import HocketTrainer

        return HocketTrainer
    if name == "exchanging":
        from hocket_transformers.local_sgd import exchanging

        return exchanging
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
