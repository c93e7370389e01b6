"""Scripts of Trainer's and of Accelerate's as users write them, for any launcher; rank 0 leaves their weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import accelerate_cases
import tiny
import torch.distributed as dist

import hocket


def main() -> None:
    made = tiny.trainer(
        "unused", tiny.Texts(40, masked=True), "sgd", dropout=0.0, optim="sgd", max_grad_norm=0.0
    )
    made.train()
    assert made.args.world_size == dist.get_world_size() == 2
    by_accelerate = accelerate_cases.of_accelerate(hocket.join(), ["sgd"], 1, True)
    if made.is_world_process_zero():
        Path("weights.json").write_text(json.dumps([tiny.weights(made.model), by_accelerate]))


if __name__ == "__main__":
    main()
