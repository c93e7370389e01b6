"""A script of TRL's as a user writes it: `trl_rank.py FILE BATCH [peft]`; rank 0 leaves its weights in FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hocket_transformers import HocketTrainer  # before SFTConfig(...) is made

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]


class MySFTTrainer(HocketTrainer, SFTTrainer):  # type: ignore[misc]  # trl has no types here
    pass


def main() -> None:
    file, batch, *more = sys.argv[1:]
    torch.set_num_threads(1)
    numbers = {word: number for number, word in enumerate([*WORDS, "<pad>", "<eos>", "<unk>"])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    texts = [" ".join(WORDS[(start + k) % 12] for k in range(6 + start % 5)) for start in range(8)]
    torch.manual_seed(0)
    sizes = {"vocab_size": len(numbers), "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, **dropouts, bos_token_id=13, eos_token_id=13, pad_token_id=12)
    )
    own: dict[str, Any] = {}
    if more:
        from peft import LoraConfig

        own["peft_config"] = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    with TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            per_device_train_batch_size=int(batch),
            max_steps=6,
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=32,
        )
        given = {"args": arguments, "train_dataset": Dataset.from_dict({"text": texts})}
        given["processing_class"] = PreTrainedTokenizerFast(tokenizer_object=words, **special)
        if arguments.world_size == 1:
            trainer = SFTTrainer(model, **given, **own)
        else:
            trainer = MySFTTrainer(model, **given, **own, hocket="sgd")
        trainer.train()
    if trainer.is_world_process_zero():
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        Path(file).write_text(json.dumps(torch.cat([p.detach().reshape(-1) for p in trained]).tolist()))


if __name__ == "__main__":
    main()
