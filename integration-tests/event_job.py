"""A rank of a job that events befall, as `events.json` in its folder says: `event_job.py FOLDER`.

What it does is in `job.json`. It goes on from the newest checkpoint, if there is one, and leaves its parameters in the
end. `Befallen` is the same for `hocket run`: the task of the digits, with the events in its data and its loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from multiprocessing import active_children
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.errors import CheckpointError
from hocket.launch.joining import launched, launched_rank
from hocket.task import Digits, TaskData
from hocket.training.startup import defer_dynamo

FOLDER_VARIABLE = "HOCKET_EVENT_JOB"
STEPS = 24
_STEP_S = 0.01

#: Deterministic ones: equal replicas, gossip, push-sum a step late, outer parameters, residuals, none.
RECIPES: dict[str, list[str]] = {
    "agd": [],
    "dpsgd": [],
    "overlap_sgp": [],
    "sgp": [],
    "powersgd": [],
    "local": [],
    "periodic_average": ["parameters.0.every=3"],
    "redsync": [],
}


class LeftError(Exception):
    """An exception that a user's script catches outside its session, and goes on from."""


class Events:
    """The events of this rank in this attempt; each happens once, and is then removed.

    Args:
        folder: the job's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.rank = launched_rank()
        self._left = [event for event in _read(folder / "events.json") if event["rank"] == self.rank]

    def before(self, moment: str) -> None:
        """Let happen what is due before this rank has joined, or attaches."""
        self._happen(lambda event: event["before"] == moment)

    def in_step(self) -> None:
        """Let happen what is due in the next step of this attempt."""
        self.step += 1
        self._happen(lambda event: event["before"] is None and event["step"] == self.step)

    def _happen(self, due: Any) -> None:
        for event in [each for each in self._left if due(each)]:
            self._left.remove(event)
            if event["to"] == "worker" and not active_children():
                continue
            _note(self.folder, f"happened-{event['number']}", str(time.time()))
            if event["what"] == "exit":
                sys.exit(0)
            if event["what"] == "vanish":
                os._exit(0)
            if event["what"] == "error":
                raise RuntimeError("what a user's script may raise")
            if event["what"] == "leave":
                raise LeftError
            if event["what"] == "full disk":
                _limit_files(event["bytes"])
            elif event["what"] == "sleep":
                time.sleep(event["pause_s"])
            elif event["delay_s"]:
                threading.Timer(event["delay_s"], _send, (self.folder, event)).start()
            else:
                _send(self.folder, event)


def _send(folder: Path, event: dict[str, Any]) -> None:
    number = getattr(signal, event["what"])
    if event["what"] == "SIGSTOP":
        subprocess.Popen(["sh", "-c", f"sleep {event['pause_s']}; kill -CONT {os.getpid()}"])
    if event["to"] in ("rank", "worker"):
        worker = active_children()[0].pid if event["to"] == "worker" else None
        os.kill(worker or os.getpid(), number)
        return
    launcher = int((folder / "launcher").read_text())
    for process in [launcher] if event["to"] == "launcher" else [*processes_of(folder), os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def processes_of(folder: Path) -> list[int]:
    """Return the processes of a job but for this one: new ones by their variable, forks by their session."""
    mark, found = f"{FOLDER_VARIABLE}={folder}".encode(), []
    launcher = (folder / "launcher").read_text()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            if marked or (session == launcher and state != "Z"):
                found.append(int(process.name))
    return [process for process in found if process != os.getpid()]


def _limit_files(nbytes: int) -> None:
    """Let files become no longer than so many bytes: a write beyond that is an error, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def _note(folder: Path, name: str, text: str = "") -> None:
    """Leave a word that is there at once or not at all, whatever the limit on files is."""
    os.symlink(text or "-", folder / f"{name}.{os.getpid()}")
    os.replace(folder / f"{name}.{os.getpid()}", folder / name)


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def trained(job: dict[str, Any], checkpoints: Path | None, events: Events | None) -> NDArray[np.float64]:
    """Train on this rank; return its parameters.

    Args:
        job: what it does.
        checkpoints: the folder to go on from and to save into; None for none.
        events: that befall this rank; None for none.
    """
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = hocket.compose(job["recipe"], *RECIPES[job["recipe"]])
    with hocket.attach(model, optimizer, strategy) as session:
        if checkpoints is not None:
            session.load(checkpoints, missing="start")
        if checkpoints is not None and job["on_signal"]:
            session.save_on_signal(checkpoints)
        workers = int(events is not None and job["workers"])
        for x in session.data(DataLoader(_batches(session.rank), batch_size=None, num_workers=workers)):
            if events is not None:
                events.in_step()
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :2]).backward()
            optimizer.step()
            if events is not None:
                time.sleep(_STEP_S)
            if checkpoints is not None and session.step % job["save_every"] == 0:
                _save(session, checkpoints, job)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def _save(session: hocket.Session, checkpoints: Path, job: dict[str, Any]) -> None:
    try:
        name = session.save(checkpoints, keep=job["keep"]).name
    except CheckpointError as error:
        if not job["catches"]:
            raise
        session.print(f"hocket: not saved: {error}")
    else:
        _note(checkpoints.parent, f"told-{name}")


def _batches(rank: int) -> Dataset[Tensor]:
    """Return a rank's batches; odd ranks have one less."""
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(STEPS - rank % 2)]
    return cast("Dataset[Tensor]", batches)


@cache
def _events() -> Events | None:
    """Return those of this rank of `hocket run`; None for its launcher, which makes the data too, and virtual ranks."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Events(Path(folder)) if folder and launched() is not None else None


@dataclass(frozen=True)
class Befallen(Digits):
    """The digits, with events."""

    def data(self, seed: int) -> TaskData:
        events = _events()
        if events is not None:
            events.before("attach")
            _note(events.folder, f"joined-{events.rank}")
        return super().data(seed)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        events = _events()
        if events is not None and torch.is_grad_enabled():
            events.in_step()
            time.sleep(_STEP_S)
        return super().loss(output, target)


def _main(folder: Path) -> None:
    defer_dynamo()
    torch.set_num_threads(1)
    events = Events(folder)
    events.before("join")
    rank = hocket.join().rank
    _note(folder, f"joined-{rank}")
    events.before("attach")
    try:
        parameters = trained(_read(folder / "job.json"), folder / "checkpoints", events)
    except LeftError:
        return
    _limit_files(resource.RLIM_INFINITY)
    np.save(folder / f"{rank}.npy", parameters)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
