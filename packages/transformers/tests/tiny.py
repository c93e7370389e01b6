"""A tiny GPT-2, its samples, and training by Trainer and by loops without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, TrainingArguments, set_seed

import hocket
from hocket_transformers import HocketTrainer

VOCABULARY, LENGTH, RATE, SEED, BATCH = 48, 12, 1e-2, 7, 4


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences of tokens in which each follows from the one before; `masked` ones have labels up to some place."""

    def __init__(self, num: int, *, masked: bool = False, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(VOCABULARY, (num, 1), generator=generator)
        self.tokens = (start + 5 * torch.arange(LENGTH)) % VOCABULARY
        self.labels = self.tokens.clone()
        self.labels[:, 0] = -100  # which no token precedes
        if masked:
            lengths = torch.randint(2, LENGTH, (num, 1), generator=generator)
            self.labels[torch.arange(LENGTH) >= lengths] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The samples of `Texts` one after the other, without a length."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self._texts[index] for index in range(len(self._texts)))


def model(dropout: float = 0.1) -> Any:
    set_seed(SEED)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0, use_cache=False))


def trainer(
    folder: Path | str,
    samples: Any,
    strategy: Any,
    kind: Any = HocketTrainer,
    *,
    dropout: float = 0.1,
    own: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Return a trainer.

    Args:
        folder, samples, strategy: its `output_dir`, `train_dataset` and `hocket`.
        kind: its class.
        dropout: of the model, where `own` has none.
        own: further arguments of the class.
        arguments: of `TrainingArguments`.
    """
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": SEED,
        "dataloader_pin_memory": False,
    }
    own = {"model": model(dropout)} | (own or {})
    made = kind(args=TrainingArguments(**defaults | arguments), train_dataset=samples, hocket=strategy, **own)
    made.remove_callback(PrinterCallback)  # standard output is the job's
    return made


def weights(trained: nn.Module) -> list[float]:
    values: list[float] = torch.cat([p.detach().reshape(-1) for p in trained.parameters()]).tolist()
    return values


def collated(batch: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in batch]) for name in batch[0]}


def _alike(batch: Any) -> float:
    return 1.0


def plain_loop(
    samples: Texts, strategy: Sequence[str], *, epochs: int, accumulated: int, by_samples: bool
) -> list[float]:
    """Return the weights of a loop as a user of Hocket's writes it, with AdamW.

    Args:
        samples, strategy, epochs, accumulated: as Trainer's.
        by_samples: whether a batch counts by its samples; else all count the same, as losses do that are divided by the
            tokens of all ranks.
    """
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=RATE, weight_decay=0.0)
    loader = hocket.loader(samples, BATCH, seed=SEED)
    set_seed(SEED)
    with hocket.attach(trained, optimizer, hocket.compose(*strategy)) as session:
        trained.train()
        for _ in range(epochs):
            for number, batch in enumerate(session.data(loader, None if by_samples else _alike), 1):
                ends = number % accumulated == 0 or number == len(loader)
                batches = (
                    accumulated
                    if number <= len(loader) // accumulated * accumulated
                    else len(loader) % accumulated
                )
                tokens = (batch["labels"] != -100).sum() * batches
                with nullcontext() if ends else session.accumulate():
                    trained(**batch, num_items_in_batch=tokens).loss.backward()
                if ends:
                    session.clip_grad_norm_(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        session.consensus()
    return weights(trained)


def without_hocket(samples: Texts, ranks: int, *, fused: bool) -> list[float]:
    """Return the weights of PyTorch's AdamW alone, by the mean of the gradients of each rank's batch."""
    trained = model(0.0)
    parameters = [*trained.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=fused)
    for whole in hocket.loader(samples, BATCH * ranks, seed=SEED):  # the order alone is Hocket's
        tokens = (whole["labels"] != -100).sum()
        gradients = []
        for rank in range(ranks):
            batch = {name: value[rank * BATCH : (rank + 1) * BATCH] for name, value in whole.items()}
            loss = trained(**batch, num_items_in_batch=tokens).loss * ranks
            gradients.append(torch.autograd.grad(loss, parameters))
        for parameter, *each in zip(parameters, *gradients, strict=True):
            parameter.grad = torch.stack(each).mean(0)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return weights(trained)


def one_process(
    samples: Texts, ranks: int, accumulated: int, *, shuffle: bool = True, losses: list[float] | None = None
) -> list[float]:
    """Return the weights of SGD in one process, each step by the mean over all tokens of its batches; add its loss."""
    trained = model(0.0)
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE)
    batches = iter(hocket.loader(samples, BATCH * ranks, seed=SEED, shuffle=shuffle))
    while group := list(islice(batches, accumulated)):
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in group)
        loss: Any = sum(trained(**batch, num_items_in_batch=tokens).loss for batch in group)
        loss.backward()
        if losses is not None:
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return weights(trained)
