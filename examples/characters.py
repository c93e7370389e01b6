"""Train a character transformer, as nanoGPT does, with DiLoCo or with gradients averaged in each step.

    hocket launch -n 4 characters.py --strategy agd
    hocket launch -n 4 characters.py --strategy diloco parameters.0.every=20

Text: any file by --text; by default the Bible of Debian's package bible-kjv-text, by way of hocket-tasks.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import hocket


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        query, key, value = (
            each.view(shape).transpose(1, 2) for each in self.attend(self.norm(x)).chunk(3, 2)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm_2(x))


class GPT(nn.Module):
    """A transformer that predicts the next of 256 bytes."""

    def __init__(self, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight  # tied, as in GPT-2
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        scores: Tensor = self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))
        return scores


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of a text, each with the same one byte later."""

    def __init__(self, data: Tensor, context: int) -> None:
        self.data, self.context = data, context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.data[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


def read(file: Path | None) -> Tensor:
    """Return a text's bytes."""
    if file is None:
        from hocket_tasks.bible_text import FILE, read_verses

        return torch.frombuffer(bytearray(read_verses(FILE)), dtype=torch.uint8)
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument("--strategy", default="agd")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the strategy")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="stretches a rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    text = read(options.text)
    split = len(text) * 9 // 10
    train, valid = (Text(part, options.context) for part in (text[:split], text[split:]))
    held_out = [
        torch.stack(each) for each in zip(*(valid[i] for i in range(min(64, len(valid)))), strict=True)
    ]
    model = GPT(options.context, options.width, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    # Warm-up, then a cosine, as in nanoGPT.
    warm_up = max(1, options.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / options.steps)))
        ),
    )
    loader = hocket.loader(train, options.batch, shuffle=True)
    with hocket.attach(model, optimizer, hocket.compose(options.strategy, *options.overrides)) as session:
        while session.step < options.steps:
            for x, y in session.data(loader):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                if session.step % 50 == 0:
                    session.print(f"step {session.step}: loss {loss.item():.3f} of rank 0's batch")
                if session.step == options.steps:
                    break
        with session.consensus(), torch.no_grad():  # one model out of all ranks'
            valid_loss = loss_of(model, *held_out).item()
        megabytes = session.counters.bytes_sent / 1e6
        session.print(
            f"{options.strategy}: held-out loss {valid_loss:.3f} nats, each rank sent {megabytes:.1f} MB"
        )


if __name__ == "__main__":
    main()
