"""A job of its own: two virtual ranks save one step into a folder. `python saving_job.py FOLDER [cannot-lock]`."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hocket
from hocket.errors import CheckpointError
from hocket.training.startup import defer_dynamo

#: While it holds something, no file can be locked.
_CANNOT: list[str] = []


def _heard(event: str, _: tuple[Any, ...]) -> None:
    if event == "fcntl.flock" and _CANNOT:
        raise OSError(errno.ENOSYS, "Function not implemented")


def cannot_lock(so: bool) -> None:
    """Let files be locked by nobody, as on some file systems, or by everybody again."""
    if so and not _CANNOT:
        sys.addaudithook(_heard)  # which cannot be taken off again
    _CANNOT[:] = ["so"] if so else []


class Told:
    """A part of a state that says which job has saved it, and is asked for it in the middle of a save."""

    def __init__(self, job: str, asked: Any = None) -> None:
        self.job, self._asked = job, asked

    def state_dict(self) -> dict[str, Any]:
        if self._asked is not None:
            self._asked()
        return {"job": self.job}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.job = state["job"]


def attached() -> hocket.Session:
    """Return a session over a small model."""
    model = nn.Linear(4, 2)
    return hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "local")


def save(folder: Path, told: Told) -> str:
    """Save on this rank; return the checkpoint's name, or why there is none."""
    with attached() as session:
        try:
            return session.save(folder, told=told).name
        except CheckpointError as error:
            return str(error)


def load(path: Path) -> str:
    """Return which job has saved this rank's part of a checkpoint."""
    told = Told("")
    with attached() as session:
        assert session.load(path, told=told).exact
    return told.job


if __name__ == "__main__":
    defer_dynamo()
    cannot_lock("cannot-lock" in sys.argv)
    print(hocket.virtual(2).run(lambda: save(Path(sys.argv[1]), Told("B")))[0])
