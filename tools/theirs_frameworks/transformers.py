"""Transformers' own scripts of distributed training, whose Trainer is HocketTrainer.

What they download is replaced: the model by a tiny one, the tokenizer by one of the script's own words, the data set by
random words.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import random
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SCRIPTS = "tests/trainer/distributed/scripts"
RECIPE = os.environ.get("HOCKET_RECIPE", "sgd").split()
MADE = "A HOCKETTRAINER WAS MADE"
#: Arguments of `train.py`, as the tests of the same names have them.
TRAINED = {
    "fp32": "--model_dtype fp32",
    "bf16": "--model_dtype bf16",
    "fp16": "--model_dtype fp16",
    "mixed bf16": "--model_dtype fp32 --bf16",
    "accumulation": "--bf16 --gradient_accumulation_steps 2",
    "eval": "--do_train --do_eval --eval_output_file eval.json",
    "batch_rebalance": "--bf16 --padding do_not_pad --train_sampling_strategy batch_rebalance",
    "batch_rebalance accumulation": "--bf16 --padding do_not_pad --train_sampling_strategy batch_rebalance "
    "--gradient_accumulation_steps 2",
    "resume": "--bf16 --save_strategy steps --save_steps 2 --logging_steps 2",
}
#: batch_rebalance_ddp.py is left out: it looks at Accelerate's sampler, in place of which are the session's samples.
OTHERS = {
    "eval_ddp.py": "",
    "loss_averaging.py": "--per_device_train_batch_size 2 --run_both_averaging_modes",
    "worker_seed.py": "",
    "dispatch_batches.py": "",
    "training_parity.py": "",
    "moe_aux_loss.py": "--use_cpu",
    "torchrun_env_check.py": "",
}


def cases(checkout: Path | None) -> list[str]:
    """Return the names of the scripts, and of the ways to train that tests start one of them with."""
    return [*OTHERS, *(f"train.py {name}" for name in TRAINED)]


def run(case: str, checkout: Path | None, folder: Path) -> int:
    """Carry out a script as a rank of a job."""
    assert checkout is not None
    name, _, how = case.partition(" ")
    script = checkout / SCRIPTS / name
    words = [*(TRAINED[how] if how else OTHERS[name]).split(), "--output_dir", str(folder)]
    if how:
        given = "--num_train_epochs 2 --per_device_train_batch_size 4 --learning_rate 5e-5 --logging_steps 1"
        words += [*given.split(), "--loss_output_file", str(folder / "losses.json")]
        words += [] if "--save_strategy" in words else ["--save_strategy", "no"]
    if name == "loss_averaging.py" and os.environ["RANK"] == "0":
        alone(script, "--per_device_train_batch_size", "4", "--output_dir", str(folder / "base"))
    carried_out(script, words)
    check = CHECKS.get(how or name)
    if check is not None:
        check(script, words, folder)
    return 0


def skipped(output: str) -> str:
    """Return why a script that did not fail says nothing; empty if it passed."""
    return "" if MADE in output else "no HocketTrainer was made"


def alone(script: Path, *words: str) -> None:
    """Carry out a script in a process that is no rank."""
    number = os.fork()
    if number == 0:
        for variable in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            del os.environ[variable]
        carried_out(script, [*words, "--average_tokens_across_devices", "True"])
        os._exit(0)
    assert os.waitpid(number, 0)[1] == 0, f"{script.name} failed on one rank"


def carried_out(script: Path, words: list[str]) -> None:
    from hocket_transformers import HocketTrainer  # by a rank: it joins the others

    class Trainer(HocketTrainer):
        """A Trainer that needs no argument of Hocket's."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"hocket": RECIPE, **kwargs})
            print(MADE, flush=True)

    texts = sorted(set(re.findall(r"[a-z]+", script.read_text().lower())))
    if importlib.util.find_spec("datasets") is None:
        replaced = types.ModuleType("datasets")
        replaced.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
        sys.modules["datasets"] = replaced
    vars(importlib.import_module("datasets")).update(load_dataset=lambda *given, **named: random_texts(texts))
    # Not the module that was imported first: Transformers replaces it.
    library = importlib.import_module("transformers")
    vars(library).update(Trainer=Trainer)
    library.AutoModelForCausalLM.from_pretrained = lambda *given, **named: tiny_model(len(texts), **named)
    library.AutoTokenizer.from_pretrained = lambda *given, **named: tokenizer(texts)
    takes_any = "HfArgumentParser" in script.read_text() and "--use_cpu" not in words
    sys.argv = [str(script), *words, *(["--use_cpu"] if takes_any else [])]
    torch.set_num_threads(1)
    runpy.run_path(str(script), run_name="__main__")


def tiny_model(num_words: int, torch_dtype: Any = None, **named: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    own = {"vocab_size": num_words + 3, "num_key_value_heads": 1, "max_position_embeddings": 128}
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **own)).to(torch_dtype or torch.float32)


def tokenizer(words: list[str]) -> Any:
    numbers = {word: number for number, word in enumerate([*words, "<pad>", "<eos>", "<unk>"])}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


class Texts(list[dict[str, Any]]):
    """The rows of a data set."""

    def map(self, function: Any, **named: Any) -> Texts:
        columns = function({"text": [row["text"] for row in self]})
        return Texts(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def random_texts(words: list[str]) -> Texts:
    draw = random.Random(1)
    return Texts({"text": " ".join(draw.choices(words, k=draw.randint(2, 100)))} for _ in range(50))


def averages(script: Path, words: list[str], folder: Path) -> None:
    """Check losses by the tokens of all ranks against those of one rank with all samples.

    Losses that each rank averages by itself differ by less than in the test, as the model is a random one.
    """
    if os.environ["RANK"] == "0":
        base, broken, fixed = (
            json.loads((folder / f"{name}_losses.json").read_text()) for name in ("base", "broken", "fixed")
        )
        assert max(abs(one - other) for one, other in zip(base, fixed, strict=True)) < 0.005, (base, fixed)
        assert max(abs(one - other) for one, other in zip(base, broken, strict=True)) > 0.005, (base, broken)


def resumes(script: Path, words: list[str], folder: Path) -> None:
    """Check the rates and the losses of a run that goes on after two steps."""

    def history() -> Any:
        newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        rows = json.loads((newest / "trainer_state.json").read_text())["log_history"]
        return [(row["learning_rate"], row["loss"]) for row in rows if "learning_rate" in row]

    whole = history()
    carried_out(script, [*words, "--resume_from_checkpoint", str(folder / "checkpoint-2")])
    assert whole == history()


def same_ranks(script: Path, words: list[str], folder: Path) -> None:
    """Check what Trainer and Accelerate say of a rank."""
    rank = os.environ["RANK"]
    found = json.loads((folder / f"env_rank{rank}.json").read_text())
    expected = {
        **{
            f"env_{name}": value
            for name, value in (("world_size", "2"), ("rank", rank), ("local_rank", rank))
        },
        **{f"args_{name}": int(rank) for name in ("process_index", "local_process_index")},
        **{f"accelerator_{name}": int(rank) for name in ("process_index", "local_process_index")},
        "args_world_size": 2,
        "accelerator_num_processes": 2,
        "accelerator_use_distributed": True,
        "accelerator_is_main_process": rank == "0",
    }
    assert {name: found[name] for name in expected} == expected


CHECKS = {"loss_averaging.py": averages, "resume": resumes, "torchrun_env_check.py": same_ranks}
