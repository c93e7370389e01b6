"""The cases that two ranks carry out."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from tiny import SEED, Stream, Texts, collated, model, plain_loop, trainer, weights
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, TrainerCallback

from hocket.api import Peer, gather
from hocket.errors import UserError
from hocket_transformers import HocketTrainer


def environment(peer: Peer) -> dict[str, Any]:
    made = trainer("unused", Texts(8), "sgd")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {
        "variables": [os.environ[name] for name in names],
        "args": [made.args.process_index, made.args.world_size, made.args.local_process_index],
        "port": os.environ["MASTER_PORT"],
    }


def against_a_loop(
    peer: Peer, strategy: list[str], num: int, accumulated: int, of_all: bool
) -> tuple[Any, Any]:
    """Return the weights of Trainer and those of a plain loop."""
    samples = Texts(num)
    made = trainer(
        "unused",
        samples,
        strategy,
        num_train_epochs=2,
        gradient_accumulation_steps=accumulated,
        average_tokens_across_devices=of_all,
    )
    made.train()
    assert made.session is None
    return weights(made.model), plain_loop(
        samples, strategy, epochs=2, accumulated=accumulated, by_samples=not of_all
    )


def against_pytorch(peer: Peer, fused: bool) -> list[float]:
    optim = "adamw_torch_fused" if fused else "adamw_torch"
    given: dict[str, Any] = {"dropout": 0.0, "average_tokens_across_devices": True}
    made = trainer("unused", Texts(40, masked=True), "sgd", optim=optim, **given)
    made.train()
    return weights(made.model)


def calls_to_gather(peer: Peer, strategy: list[str]) -> tuple[int, int]:
    """Return how often Accelerate gathers in training, and the steps."""
    made = trainer("unused", Texts(40), strategy, num_train_epochs=1, average_tokens_across_devices=True)
    calls: list[object] = []
    gather = made.accelerator.gather

    def counted(tensor: Any) -> Any:
        calls.append(tensor)
        return gather(tensor)

    made.accelerator.gather = counted
    made.train()
    return len(calls), made.state.global_step


def against_one_process(peer: Peer, num: int, accumulated: int) -> tuple[list[float], list[float]]:
    """Return the weights, and the losses that Trainer logs."""
    made = trainer(
        "unused",
        Texts(num, masked=True),
        "sgd",
        dropout=0.0,
        optim="sgd",
        max_grad_norm=0.0,
        gradient_accumulation_steps=accumulated,
        average_tokens_across_devices=True,
    )
    made.train()
    return weights(made.model), [row["loss"] for row in made.state.log_history if "loss" in row]


class Stop(TrainerCallback):  # type: ignore[misc]
    """Stops after a step, as a kill would, but in order."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == self._step


def drawing(batch: Any) -> dict[str, torch.Tensor]:
    """Collate as one that masks tokens at random does."""
    whole = collated(batch)
    whole["input_ids"] = torch.where(torch.rand(whole["input_ids"].shape) < 0.2, 0, whole["input_ids"])
    return whole


def resumed(
    peer: Peer, folder: str, strategy: list[str], stream: bool, stop: int, blocking: bool = True
) -> dict[str, Any]:
    """Return the weights and logs of a whole run, and those of one that was stopped and goes on."""
    texts = Texts(44, masked=True)
    samples = Stream(texts) if stream else texts
    given: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": stop,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "own": {"data_collator": drawing, "blocking_saves": blocking},
        **({"max_steps": 5} if stream else {"num_train_epochs": 2}),
    }
    whole = trainer(Path(folder, "whole"), samples, strategy, **given)
    whole.train()
    cut = trainer(Path(folder, "cut"), samples, strategy, **given)
    cut.add_callback(Stop(stop))
    cut.train(resume_from_checkpoint="last")
    rest = trainer(Path(folder, "cut"), samples, strategy, **given)
    rest.train(resume_from_checkpoint="last")
    # The rows before are rank 0's: Trainer saves them.
    keys = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    rows = {
        name: [[row.get(key) for key in keys] for row in each.state.log_history[stop:-1]]
        for name, each in (("whole", whole), ("rest", rest))
    }
    return {
        "whole": [weights(whole.model), rows["whole"]],
        "rest": [weights(rest.model), rows["rest"]],
        "cut": [weights(cut.model), []],
    }


class Ask(TrainerCallback):  # type: ignore[misc]
    """Asks a rank to end after a step, as a scheduler asks the job."""

    def __init__(self, step: int, rank: int) -> None:
        self._step, self._rank = step, rank

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._step and args.process_index == self._rank:
            signal.raise_signal(signal.SIGUSR1)


def asked_to_end(peer: Peer, folder: str) -> dict[str, Any]:
    """Return the weights of a whole run, how one ended that was asked to, and the weights after it went on."""

    def made(name: str) -> Any:
        given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100, "num_train_epochs": 2}
        own = {"blocking_saves": False}
        return trainer(Path(folder, name), Texts(44), ["diloco", "parameters.0.every=3"], own=own, **given)

    whole = made("whole")
    whole.train()
    asked = made("asked")
    asked.add_callback(Ask(4, rank=1))
    status: Any = None
    try:
        asked.train()
    except SystemExit as end:
        status = end.code
    for number in (signal.SIGTERM, signal.SIGUSR1):  # which a process that has ended ignores
        signal.signal(number, signal.SIG_DFL)
    gather(peer, None)
    left = [path.name for path in Path(folder, "asked").iterdir()]
    rest = made("asked")
    rest.train(resume_from_checkpoint=True)
    return {
        "whole": weights(whole.model),
        "rest": weights(rest.model),
        "status": status,
        "left": left,
    }


def failed_first(peer: Peer, folder: str) -> dict[str, Any]:
    """Return the weights of a whole run, and those of a trainer that failed, went on, and trained once more."""
    handled: list[bool] = []

    class Fails(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            handled.append(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
            if len(handled) == 2:
                raise ZeroDivisionError

    def made(name: str, *callbacks: TrainerCallback) -> Any:
        given: dict[str, Any] = {
            "save_strategy": "steps",
            "save_steps": 1,
            "own": {"callbacks": [*callbacks]},
        }
        return trainer(Path(folder, name), Texts(24), ["diloco", "parameters.0.every=2"], **given)

    whole = made("whole")
    whole.train()
    cut = made("cut", Fails())
    try:
        cut.train()
    except ZeroDivisionError:
        handled.append(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
    cut.train(resume_from_checkpoint=True)
    rest = weights(cut.model)
    cut.train()
    return {
        "whole": weights(whole.model),
        "rest": rest,
        "again": weights(cut.model),
        "steps": cut.state.global_step,
        "handled": handled,
    }


def looked_at(peer: Peer, folder: str) -> dict[str, Any]:
    """Train replicas that differ; return what was evaluated, and what the saved model gives."""
    held_out = Texts(23, seed=2)
    made = trainer(
        folder,
        Texts(48),
        "dpsgd",
        own={"eval_dataset": held_out},
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=3,
        save_steps=3,
        max_steps=6,
    )
    made.train()
    assert made.state.log_history
    rows = [row for row in made.state.log_history if "eval_loss" in row]
    again = GPT2LMHeadModel.from_pretrained(Path(folder, "checkpoint-3")).eval()
    batch = collated([held_out[index] for index in range(len(held_out))])
    with torch.no_grad():
        alone = again(**batch).loss.item()
    made.save_model(str(Path(folder, "last")))
    gather(peer, None)
    last = GPT2LMHeadModel.from_pretrained(Path(folder, "last"))
    return {
        "evaluated": rows[0]["eval_loss"],
        "by the saved model": alone,
        "trained": weights(made.model),
        "saved": weights(last),
        "files": sorted(path.name for path in Path(folder, "checkpoint-3").iterdir()),
    }


def best(peer: Peer, folder: str) -> dict[str, Any]:
    """Train until early stopping, with a rate that soon does harm, and keep the best."""
    made = trainer(
        folder,
        Texts(64),
        ["diloco", "parameters.0.every=2"],
        own={"eval_dataset": Texts(16, seed=2), "callbacks": [EarlyStoppingCallback(2)]},
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        num_train_epochs=20,
        learning_rate=0.5,
        load_best_model_at_end=True,
    )
    made.train()
    saved = GPT2LMHeadModel.from_pretrained(made.state.best_model_checkpoint)
    return {"steps": made.state.global_step, "trained": weights(made.model), "best": weights(saved)}


def replaced(peer: Peer, strategy: list[str]) -> dict[str, Any]:
    """Train with a callback that replaces the trained weights, as those of moving averages do; return the weights."""
    seen: dict[str, Any] = {}

    class Replaces(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            seen["trained"] = weights(model)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            seen["at the end"] = weights(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()

    made = trainer("unused", Texts(40), strategy, own={"callbacks": [Replaces()]})
    made.train()
    return {**seen, "left": weights(made.model)}


def logs(peer: Peer) -> dict[str, Any]:
    """Train with clipping; return this rank's rows, and how often callbacks saw a step and a log."""
    seen: list[str] = []

    class Sees(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.append("step")

        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                seen.append("log")

    made = trainer(
        "unused",
        Texts(40),
        "agd",
        own={"callbacks": [Sees()]},
        max_grad_norm=0.1,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        num_train_epochs=2,
    )
    made.train()
    rows = [row for row in made.state.log_history if "grad_norm" in row]
    return {
        "norms": [row["grad_norm"] for row in rows],
        "rates": [row["learning_rate"] for row in rows],
        "steps": made.state.max_steps,
        "global": made.get_total_train_batch_size(made.args)
        if hasattr(made, "get_total_train_batch_size")
        else 8,
        "seen": [seen.count("step"), seen.count("log")],
    }


class Numbered(Texts):
    """Texts of different lengths that say which they are."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index, : 2 + index % 10].tolist(), "number": index}


def shares(peer: Peer, kind: str) -> list[list[int]]:
    """Return the numbers of the samples that this rank was given, batch by batch, in two epochs."""
    given: list[list[int]] = []

    def collate(batch: Any) -> dict[str, torch.Tensor]:
        given.append([sample["number"] for sample in batch])
        tokens = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(sample["input_ids"]) for sample in batch], batch_first=True
        )
        return {"input_ids": tokens, "labels": tokens}

    texts: Any = Numbered(50)
    arguments: dict[str, Any] = {}
    if kind == "group_by_length":
        import dataclasses

        import transformers

        names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
        new = "train_sampling_strategy" in names
        arguments = {"train_sampling_strategy": kind} if new else {"group_by_length": True}
    elif kind == "stream":
        texts, arguments = Stream(texts), {"max_steps": 14}
    made = trainer(
        "unused",
        texts,
        "sgd",
        num_train_epochs=2,
        remove_unused_columns=False,
        own={"data_collator": collate},
        **arguments,
    )
    made.train()
    return given


def half_precision(peer: Peer) -> dict[str, Any]:
    given: dict[str, Any] = {"gradient_checkpointing_kwargs": {"preserve_rng_state": True}}
    made = trainer("unused", Texts(40), "sgd", bf16=True, gradient_checkpointing=True, **given)
    made.train()
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    return {
        "losses": losses,
        "trained": weights(made.model),
        "dtype": str(next(made.model.parameters()).dtype),
        "reentrant": [
            kwargs["use_reentrant"]
            for name in ("gradient", "activation")
            if (kwargs := getattr(made.args, f"{name}_checkpointing_kwargs", None))
        ],
    }


def adapters(peer: Peer, folder: str) -> dict[str, Any]:
    """Train LoRA's adapters; return the bytes that a step has sent."""
    from peft import LoraConfig, get_peft_model

    base = model()
    before = weights(base)
    torch.manual_seed(SEED + peer.rank)  # rank 0's are everybody's
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    sent: list[int] = []

    class Counts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            sent.append(made.session.counters.bytes_sent)

    made = trainer(
        folder, Texts(40), "sgd", own={"model": adapted, "callbacks": [Counts()]}, save_strategy="epoch"
    )
    made.train()
    trainable = [p for p in made.model.parameters() if p.requires_grad]
    frozen = [p for name, p in made.model.named_parameters() if not p.requires_grad]
    return {
        "adapters": torch.cat([p.detach().reshape(-1) for p in trainable]).tolist(),
        "sent": sent[1] - sent[0],
        "numel": sum(p.numel() for p in trainable),
        "frozen": torch.cat([p.detach().reshape(-1) for p in frozen]).tolist() == before,
        "files": sorted(path.name for path in Path(folder, "checkpoint-5").iterdir()),
    }


def written(peer: Peer, folder: str) -> list[tuple[int, float]]:
    """Train with evaluation into the folder of a run; return the steps and losses of its evaluations."""
    made = trainer(
        "unused",
        Texts(40),
        "agd",
        own={"eval_dataset": Texts(8), "hocket_options": {"out": folder}},
        eval_strategy="steps",
        eval_steps=2,
    )
    made.train()
    return [(row["step"], row["eval_loss"]) for row in made.state.log_history if "eval_loss" in row]


def outside_of_train(peer: Peer) -> list[str]:
    """Return the reasons for which a step outside of Trainer's loop is refused."""
    reasons = []

    class OwnLoop(HocketTrainer):
        """A Trainer whose loop is its own, as that of some of TRL's."""

        def _inner_training_loop(self, *given: Any, **named: Any) -> None:
            self.current_gradient_accumulation_steps = 1
            self.training_step(self.model, collated([Texts(4)[n] for n in range(4)]))

    made = trainer("unused", Texts(8), "sgd", OwnLoop)
    for call in (made._inner_training_loop, made.train):
        try:
            call()
        except UserError as error:
            reasons.append(str(error))
    return reasons
