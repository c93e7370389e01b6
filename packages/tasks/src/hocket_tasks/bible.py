"""A character language model of real text, the King James Bible: its sentences, or stretches of one length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hocket.api import Task, TaskData
from hocket_tasks.bible_text import FILE, read_verses
from hocket_tasks.recurrent import CharacterModel
from hocket_tasks.sequences import NextElements, Sequences
from hocket_tasks.transformer import CharacterTransformer

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

_NUM_CHARACTERS = 128  # ASCII; 0 is padding
_BETWEEN_SENTENCES = re.compile(rb"(?<=[.?!]) ")


class Network(StrEnum):
    """The model that predicts characters."""

    LSTM = "lstm"
    TRANSFORMER = "transformer"


@dataclass(frozen=True)
class Bible(Task):
    """Prediction of the next character: inputs int64 [T], targets the same characters shifted by one.

    There are 29,710 sentences of 4 to 2,298 characters, 138 on average with a standard deviation of 102. So a step
    takes one rank several times as long as another. The end of the text is held out. The loss, in nats, and
    the accuracy are means over a sentence's characters, then over sentences.

    Attributes:
        length: characters of a sample, 2 or more, to cut the text into equal pieces; null if each sentence is a sample.
        longest: the number of characters after which a sentence is cut off; 2 or more.
        network: the model, an `lstm` of one layer or a `transformer`.
        hidden: units of the embedding and of each layer, 1 or more.
        layers: the number of the transformer's layers, 1 or more.
        heads: attention heads per layer, 1 or more; `hidden` must be a multiple of it.
        held_out: one of this many samples is held out, 1 or more.
        file: the text, as Debian's package bible-kjv-text has it, or any other: plain, or a folder that the library
            datasets has written, with a column `text`.
    """

    length: int | None = None
    longest: int = 512
    network: Network = Network.LSTM
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    held_out: int = 20
    file: str = FILE

    def __post_init__(self) -> None:
        least = {"length": 2, "longest": 2, "hidden": 1, "layers": 1, "heads": 1, "held_out": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} is {value}; allowed: {smallest} or more")
        if self.network is Network.TRANSFORMER and self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}; allowed: a multiple of the {self.heads} heads")

    def data(self, seed: int) -> TaskData:
        text = read_verses(self.file)
        pieces = self._sentences(text) if self.length is None else self._stretches(text, self.length)
        split = len(pieces) - len(pieces) // self.held_out
        # Sorted, batches of an evaluation have little padding.
        return TaskData(_samples(pieces[:split]), _samples(sorted(pieces[split:], key=len)))

    def _sentences(self, text: bytes) -> list[bytes]:
        # A single character has no next one.
        return [s[: self.longest] for s in _BETWEEN_SENTENCES.split(text) if len(s) > 1]

    @staticmethod
    def _stretches(text: bytes, length: int) -> list[bytes]:
        """Return pieces of length + 1 characters, the last of which, only a target here, begins the next."""
        return [text[start : start + length + 1] for start in range(0, len(text) - length, length)]

    def model(self) -> nn.Module:
        if self.network is Network.LSTM:
            return CharacterModel(_NUM_CHARACTERS, self.hidden)
        longest = self.longest - 1 if self.length is None else self.length
        return CharacterTransformer(_NUM_CHARACTERS, longest, self.hidden, self.layers, self.heads)

    def tensor_plan(self, model: nn.Module, ranks: int) -> Mapping[str, ParallelStyle]:
        return model.tensor_plan(ranks) if isinstance(model, CharacterTransformer) else {}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        nats = cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0, reduction="none")
        return _mean_of_sentences(nats.view_as(target), target).mean()

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        right = (output.argmax(dim=2) == target) & (target != 0)
        return {"accuracy": _mean_of_sentences(right.float(), target).sum()}


def _samples(pieces: list[bytes]) -> NextElements:
    characters = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    return NextElements(Sequences.of_lengths(characters, np.array([len(piece) for piece in pieces])))


def _mean_of_sentences(values: Tensor, target: Tensor) -> Tensor:
    """Return the mean of each row of values, zero where its target is padding, over the others, [B]."""
    return values.sum(dim=1) / (target != 0).sum(dim=1)
