"""Seconds that a checkpoint adds to training: none, `session.save` that blocks, and one beside training.

    python packages/core-runtime/benchmarks/saving.py [MILLIONS] [ROUNDS] [--steps N] [--bfloat16] [--momentum] [--dcp]
        [--folder DIR]

One rank trains a stack of linear layers with SGD, and saves once. The three ways alternate, on one model; each row is
the median over the rounds, with seconds of a save's call and of all steps from it until the checkpoint is complete.
`--dcp` adds torch.distributed.checkpoint of the same state in this process, and the bytes that it writes.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

import hocket


def model_of(millions: float, dtype: torch.dtype) -> nn.Module:
    """Return layers of 4 million parameters each."""
    layers = [nn.Linear(2000, 2000, bias=False, dtype=dtype) for _ in range(max(1, round(millions / 4)))]
    return nn.Sequential(*layers)


class Training:
    """A model in training, step by step."""

    def __init__(self, millions: float, dtype: torch.dtype, steps: int, momentum: float) -> None:
        self._steps = steps
        self.model = model_of(millions, dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=momentum)
        self.session = hocket.attach(self.model, self.optimizer, "local")
        self._batch = torch.randn(16, 2000, dtype=dtype)

    def step(self) -> None:
        """Train on the same batch again."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()

    def round_s(self, way: str, folder: Path) -> tuple[float, float, int]:
        """Return the seconds of the save's call, those of the round with it, and the round's steps."""
        self.step()
        begun_s = time.perf_counter()
        called_s, path = 0.0, None
        if way == "dcp":
            save(dict(self.session.inner.state_dict()), checkpoint_id=folder / "dcp", no_dist=True)
            called_s = time.perf_counter() - begun_s
        elif way != "none":
            path = self.session.save(folder, keep=1, blocking=way == "blocking")
            called_s = time.perf_counter() - begun_s
        steps = 0
        while steps < self._steps or (path is not None and not path.exists()):
            self.step()
            steps += 1
        took_s = time.perf_counter() - begun_s
        beside = self.session.inner.beside_training
        if beside is not None:
            beside.finish()
        return called_s, took_s, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("millions", type=float, nargs="?", default=100)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--momentum", action="store_true", help="of 0.9, which is saved too")
    parser.add_argument("--dcp", action="store_true", help="save by torch.distributed.checkpoint, too")
    parser.add_argument(
        "--steps", type=int, default=12, help="of a round, at least; the save comes before them"
    )
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    took: dict[str, list[tuple[float, float, int]]] = {"none": [], "blocking": [], "beside": []}
    if given.dcp:
        took["dcp"] = []
    try:
        dtype = torch.bfloat16 if given.bfloat16 else torch.float32
        training = Training(given.millions, dtype, given.steps, 0.9 if given.momentum else 0.0)
        training.round_s("beside", folder)  # takes the memory for copies
        for _ in range(given.rounds):
            for way, seconds in took.items():
                seconds.append(training.round_s(way, folder))
        size = sum(path.stat().st_size for path in folder.rglob("rank-*"))
        of_dcp = sum(path.stat().st_size for path in (folder / "dcp").glob("*")) if given.dcp else 0
        training.session.close()
    finally:
        shutil.rmtree(folder)
    step_s = statistics.median(of_round / steps for _, of_round, steps in took["none"])
    print(f"{given.millions:g} M parameters, {size / 1e6:.1f} MB, steps of {step_s:.3f} s")
    if given.dcp:
        print(f"{of_dcp / 1e6:.1f} MB by torch.distributed.checkpoint")
    for way, seconds in took.items():
        called_s = statistics.median(call for call, _, _ in seconds)
        added_s = statistics.median(of_round - steps * step_s for _, of_round, steps in seconds)
        most = max(steps for _, _, steps in seconds)
        print(f"{way:>9}: call {called_s:7.3f} s, adds {added_s:7.3f} s, in up to {most} steps")


if __name__ == "__main__":
    main()
