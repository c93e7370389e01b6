"""Frozen parameters, as under adapters (LoRA), in a checkpoint: once where all ranks hold the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hocket


class Adapted(nn.Module):
    """A large frozen layer, and a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(300, 8).requires_grad_(False)
        self.adapter = nn.Linear(300, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.base(x) + self.adapter(x)
        return total


def on_ranks(
    size: int, folder: Path, *, steps: int, load: bool = False, differs: bool = False
) -> list[dict[str, Tensor]]:
    """Train some steps and save; return each rank's whole model."""

    def run() -> dict[str, Tensor]:
        rank = hocket.join().rank
        torch.manual_seed(rank)
        model = Adapted()
        optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.1, momentum=0.9)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            if load:
                session.load(folder)
            elif differs:
                model.base.weight += rank
            for step in range(steps):
                x = torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * step + rank))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if not load:
                session.save(folder)
            return {name: value.clone() for name, value in model.state_dict().items()}

    return hocket.virtual(size).run(run)


def sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(folder.glob("*/*.safetensors"))]


@pytest.mark.parametrize("differs", [False, True])
def test_each_rank_goes_on_with_its_own(differs: bool, tmp_path: Path) -> None:
    saved = on_ranks(3, tmp_path, steps=2, differs=differs)
    assert torch.equal(saved[0]["base.weight"], saved[1]["base.weight"]) is not differs
    first, *others = sizes(tmp_path)
    frozen = 4 * 300 * 8
    assert all((first - size > 0.9 * frozen) is not differs for size in others)
    for given, expected in zip(on_ranks(3, tmp_path, steps=0, load=True), saved, strict=True):
        for name, value in expected.items():
            assert torch.equal(given[name], value), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_other_ranks_go_on_with_it(size: int, tmp_path: Path) -> None:
    saved = on_ranks(3, tmp_path, steps=2)
    mean = torch.stack([each["adapter.weight"].double() for each in saved]).mean(0)
    for given in on_ranks(size, tmp_path, steps=0, load=True):
        assert torch.equal(given["base.weight"], saved[0]["base.weight"])
        torch.testing.assert_close(given["adapter.weight"].double(), mean)
