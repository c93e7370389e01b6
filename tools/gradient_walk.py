"""The walk of a gradient, from the hook that completes a segment to the first byte on the wire.

tools/count --walk launches two ranks of it. A return is a move into a file that was left before. Calls of other threads
do not count.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import hocket

#: The call that puts a byte on the wire: a socket's, or, between ranks of one host, a pipe's in shared memory.
SEND = "sendmsg"


class Walk:
    """The functions of Hocket on the way to the wire, in the order of their calls.

    Attributes:
        functions: (file below `src`, qualified name) of each call; empty until a byte has been sent.
    """

    def __init__(self) -> None:
        self.functions: list[tuple[str, str]] = []
        self._calls: list[tuple[str, str]] = []

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Note a call; the function for `sys.setprofile`."""
        if self.functions:
            return
        if event == "call" and _is_ours(frame):
            if not _is_ours(frame.f_back):  # another hook
                self._calls.clear()
            self._calls.append((frame.f_code.co_filename.split("/src/")[1], frame.f_code.co_qualname))
        called = {"call": frame.f_code.co_name, "c_call": getattr(argument, "__name__", "")}.get(event)
        if self._calls and called == SEND:
            self.functions = list(self._calls)

    def __str__(self) -> str:
        files: list[str] = []
        for file, _ in self.functions:
            if not files or files[-1] != file:
                files.append(file)
        returns = sum(file in files[:number] for number, file in enumerate(files))
        return (
            f"files {len(set(files))}, folders {len({str(Path(file).parent) for file in files})}, "
            f"functions {len(set(self.functions))}, moves {len(files) - 1}, returns {returns}"
        )


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and "/src/hocket" in frame.f_code.co_filename


def main(*, verbose: bool) -> None:
    """Train three steps, walk in the third, and print the walk on rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    walk = Walk()
    with hocket.attach(model, optimizer, "agd") as session:
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            sys.setprofile(walk.profile if step == 2 else None)
            loss.backward()
            sys.setprofile(None)
            optimizer.step()
        session.consensus()
        if session.rank:
            return
    for file, name in walk.functions if verbose else ():
        print(f"  {file}  {name}")
    print(walk)


if __name__ == "__main__":
    main(verbose="--list" in sys.argv)
