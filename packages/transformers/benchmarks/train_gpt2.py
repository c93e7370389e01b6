"""A small GPT-2 on the bytes of a text by HocketTrainer, or by Trainer and its DistributedDataParallel.

    hocket launch -n 4 --out runs/a train_gpt2.py --strategy diloco parameters.0.every=20
    hocket launch -n 4 --transport torch train_gpt2.py --ddp runs/ddp        # rows in runs/ddp/metrics.jsonl

`slow_network.py` beside this file starts it. The text is the Bible of Debian's package bible-kjv-text.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from hocket_tasks.bible_text import FILE, read_verses
from hocket_transformers import HocketTrainer  # before TrainingArguments(...) is made

CONTEXT, WIDTH, BATCH = 64, 64, 4
HELD_OUT = 64  # sequences


class Rows(TrainerCallback):  # type: ignore[misc]
    """The rows of `metrics.jsonl` for a run without a session.

    Args:
        folder: of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._since_s = folder / "metrics.jsonl", 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        self._since_s = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if state.is_world_process_zero:
            row = {"step": state.global_step, "seconds": time.monotonic() - self._since_s, **logs}
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")


def stretches(text: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    whole = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()
    return [{"input_ids": row, "labels": row} for row in whole]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="agd")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the strategy")
    parser.add_argument("--ddp", type=Path, metavar="FOLDER", help="train by DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(options.seed)
    text = torch.frombuffer(bytearray(read_verses(FILE)), dtype=torch.uint8)
    split = len(text) * 9 // 10
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=options.steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=options.steps // 20,
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 12),
            logging_steps=max(1, options.steps // 12),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=options.seed,
        )
        data = {"train_dataset": stretches(text[:split]), "eval_dataset": stretches(text[split:])[:HELD_OUT]}
        if options.ddp is not None:
            trainer = Trainer(model, arguments, callbacks=[Rows(options.ddp)], **data)
        else:
            trainer = HocketTrainer(model, arguments, hocket=[options.strategy, *options.overrides], **data)
        trainer.train()


if __name__ == "__main__":
    main()
