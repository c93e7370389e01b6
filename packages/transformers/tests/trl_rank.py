"""A script of TRL's as a user writes it: `trl_rank.py FILE whole|lora|dpo|grpo BATCH [STRATEGY...]`.

Rank 0 leaves its weights in FILE: those at the end, and with a strategy also those of a run that goes on from the
checkpoint of its middle, and of the saved model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback

from hocket_transformers import HocketTrainer  # before arguments are made

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]


def text(start: int, length: int, step: int = 1) -> str:
    return " ".join(WORDS[(start + step * k) % 12] for k in range(length))


def tokenizer() -> PreTrainedTokenizerFast:
    numbers = {word: number for number, word in enumerate([*WORDS, "<pad>", "<eos>", "<unk>"])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 15, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=13, eos_token_id=13, pad_token_id=12))


class Seeds(TrainerCallback):  # type: ignore[misc]
    """Random numbers that say which step and rank draws a completion, however many were drawn before."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(2 * state.global_step + args.process_index)


def early(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: the share of its words that are early in the alphabet."""
    return [sum(word < "e" for word in each.split()) / 4 for each in completions]


def trainer(kind: str, batch: str, strategy: list[str]) -> Any:
    given: dict[str, Any] = {"processing_class": tokenizer(), "callbacks": [Seeds()]}
    arguments: dict[str, Any] = {}
    name = {"dpo": "DPO", "grpo": "GRPO"}.get(kind, "SFT")
    if kind == "dpo":
        rows = {"prompt": [text(k, 3) for k in range(8)], "chosen": [" " + text(k + 3, 4) for k in range(8)]}
        rows["rejected"] = [" " + text(k + 3, 3 + k % 3, 5) for k in range(8)]
        arguments, given["ref_model"] = {"max_length": 32}, model()
    elif kind == "grpo":
        rows = {"prompt": [text(k, 3) for k in range(8)]}
        arguments = {"max_completion_length": 4, "num_generations": 4, "temperature": 1.0}
        given["reward_funcs"] = early
    else:
        rows = {"text": [text(k, 6 + k % 5) for k in range(8)]}
        arguments = {"max_length": 32}
    if kind == "lora":
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    args = getattr(trl, f"{name}Config")(
        "trained",
        per_device_train_batch_size=int(batch),
        max_steps=6,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **arguments,
    )
    plain = getattr(trl, f"{name}Trainer")
    given |= {"args": args, "train_dataset": Dataset.from_dict(rows)}
    if not strategy:
        return plain(model(), **given)
    with_hocket = type(f"My{name}Trainer", (HocketTrainer, plain), {})
    return with_hocket(model(), **given, hocket=strategy)


def weights(made: Any) -> list[float]:
    trained = [p for p in made.model.parameters() if p.requires_grad]
    return torch.cat([p.detach().reshape(-1) for p in trained]).tolist()


def saved(made: Any) -> list[float]:
    """Return the weights that `save_model` wrote, in the model's order."""
    made.save_model("saved")
    made.accelerator.wait_for_everyone()
    [file] = Path("saved").glob("*model.safetensors")
    kept = load_file(file)
    names = [name.replace(".default", "") for name, p in made.model.named_parameters() if p.requires_grad]
    return torch.cat([kept[name].reshape(-1) for name in names]).tolist()


def main() -> None:
    file, kind, batch, *strategy = sys.argv[1:]
    torch.set_num_threads(1)
    made = trainer(kind, batch, strategy)
    made.train()
    left = [weights(made)]
    if strategy:
        rest = trainer(kind, batch, strategy)
        rest.train(resume_from_checkpoint="trained/checkpoint-3")
        left += [weights(rest), saved(rest)]
    if made.is_world_process_zero():
        Path(file).write_text(json.dumps(left))


if __name__ == "__main__":
    main()
