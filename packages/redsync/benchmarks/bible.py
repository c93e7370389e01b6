"""A language model on real text: the King James Bible, characters, an LSTM. A task for `hocket run`.

    apt-get install bible-kjv-text
    cd packages/redsync/benchmarks && hocket run redsync task.name=bible:Bible -n 4

Debian's package has the text in blocks of 64 KiB, each as `compress` writes it but for the three bytes of its header,
behind a table of big-endian offsets.
"""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hocket.errors import UserError
from hocket.task.api import Task, TaskData
from hocket_tasks.recurrent import CharacterModel

_TABLE_AT = 0x58
_COMPRESS_HEADER = b"\x1f\x9d\x90"


@lru_cache(maxsize=1)
def read_bible(path: str) -> bytes:
    """Return the text.

    Raises:
        UserError: the file is not there.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; apt-get install bible-kjv-text, or set task.path"
        ) from error
    [num_blocks] = struct.unpack_from(">I", data, _TABLE_AT)
    starts = [*struct.unpack_from(f">{num_blocks}I", data, _TABLE_AT + 4), len(data)]
    blocks = (data[start:stop] for start, stop in pairwise(starts))
    return b"".join(
        subprocess.run(
            ["gzip", "-dc"], input=_COMPRESS_HEADER + block, capture_output=True, check=True
        ).stdout
        for block in blocks
    )


class _Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of text, int64 [length], and the same one character later."""

    def __init__(self, text: Tensor, length: int) -> None:
        self._text, self._length = text, length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        window = self._text[start : start + self._length + 1].long()
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Bible(Task):
    """Predict the next character; the last twentieth of the text is held out.

    The loss is in nats per character: its exponential is the perplexity.

    Attributes:
        path: the package's file.
        length: characters in a stretch.
        hidden: units of the LSTM.
    """

    path: str = "/usr/lib/bible.data"
    length: int = 64
    hidden: int = 256

    def data(self, seed: int) -> TaskData:
        text = torch.frombuffer(bytearray(read_bible(self.path)), dtype=torch.uint8).clamp(max=127)
        split = len(text) * 19 // 20
        return TaskData(_Windows(text[:split], self.length), _Windows(text[split:], self.length))

    def model(self) -> nn.Module:
        return CharacterModel(128, self.hidden)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())
