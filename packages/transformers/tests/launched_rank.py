"""A script as a user writes it, for any launcher; rank 0 leaves its weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny
import torch.distributed as dist


def main() -> None:
    made = tiny.trainer(
        "unused", tiny.Texts(40, masked=True), "sgd", dropout=0.0, optim="sgd", max_grad_norm=0.0
    )
    made.train()
    assert made.args.world_size == dist.get_world_size() == 2
    if made.is_world_process_zero():
        Path("weights.json").write_text(json.dumps(tiny.weights(made.model)))


if __name__ == "__main__":
    main()
