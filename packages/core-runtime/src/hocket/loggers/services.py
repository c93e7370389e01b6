"""Loggers that other programs show."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hocket.disk import naming, write_text
from hocket.errors import UserError
from hocket.installing import how_to_install
from hocket.loggers.api import Log, Logger, Row
from hocket.own_files import set_aside
from hocket.plain import Tree, TreeView

_log = logging.getLogger("hocket")


#: The suffix of Hocket's own event files, so that it removes no others.
_OWN = ".hocket"


def _require(library: str) -> None:
    if find_spec(library) is None:
        raise UserError(
            f"logger {library}: the library is not installed: {how_to_install('hocket-core', library)}, or leave it out"
        )


def _numbers(row: Row) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


@dataclass(frozen=True)
class TensorBoard(Logger):
    """Event files in the folder `tensorboard`, which `tensorboard --logdir` shows."""

    files: ClassVar = ("tensorboard",)

    def check(self) -> None:
        _require("tensorboard")

    def open(self, folder: Path, config: TreeView, resumed_after: int | None) -> Log:
        place = folder / "tensorboard"
        with naming(place):
            place.mkdir(parents=True, exist_ok=True)
            if resumed_after is None:
                for earlier in place.glob(f"events.out.tfevents.*{_OWN}"):
                    earlier.unlink()
            log = _TensorBoardLog(place)
        if resumed_after is None:
            log.note(f"```json\n{json.dumps(config, indent=1, default=str)}\n```")
        else:
            log.take_back(resumed_after + 1)
        return log


class _TensorBoardLog(Log):
    """An event file, which torch's `SummaryWriter` would write in a thread: a full disk would be that one's error."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._proto = event_pb2
        self._path = (
            folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}{_OWN}"
        )
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")

    def note(self, text: str) -> None:
        """Write the configuration, as Markdown."""
        from torch.utils.tensorboard.summary import text as of_text

        self._write(summary=of_text("config", text))

    def take_back(self, step: int) -> None:
        """Hide a step of earlier files, and all later ones."""
        log = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._write(session_log=log, step=step)

    def write(self, row: Row) -> None:
        from torch.utils.tensorboard.summary import scalar

        for name, value in _numbers(row).items():
            self._write(summary=scalar(name, value), step=row["step"])
        with naming(self._path):
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()

    def _write(self, **event: object) -> None:
        with naming(self._path):
            self._records.write(self._proto.Event(wall_time=time.time(), **event).SerializeToString())


class WandbMode(StrEnum):
    """The time at which rows are sent: as they come, or by `wandb sync`, which finds them in the folder."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True)
class Wandb(Logger):
    """Weights & Biases, in the folder `wandb`.

    Attributes:
        project: the run's project.
        mode: `online`, or `offline` for `wandb sync` later; null takes WANDB_MODE, or `online` if it is unset.
    """

    files: ClassVar = ("wandb", "wandb.json")

    project: str = "hocket"
    mode: WandbMode | None = None

    def check(self) -> None:
        _require("wandb")
        mode = self.mode or os.environ.get("WANDB_MODE", WandbMode.ONLINE)
        if mode == WandbMode.ONLINE:
            import wandb

            if not wandb.login(prompt=False):
                raise UserError(
                    "logger wandb: there is no API key: call `wandb login`, or write {name: wandb, mode: offline}"
                )

    def open(self, folder: Path, config: TreeView, resumed_after: int | None) -> Log:
        import wandb

        note = folder / "wandb.json"
        noted = _read_note(note) if resumed_after is not None and note.exists() else {}
        run = wandb.init(
            project=self.project,
            name=config.get("name"),
            id=noted.get("id"),
            resume="allow" if noted else None,
            dir=folder,
            mode=None if self.mode is None else self.mode.value,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        return _WandbLog(run, note, noted.get("step", -1))


def _read_note(note: Path) -> Tree:
    """Return the service's run to continue, and its last step; nothing if the note is damaged."""
    try:
        noted = json.loads(note.read_bytes())
        if isinstance(noted["id"], str) and type(noted["step"]) is int:
            return dict(noted)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    _log.warning(
        "%s is damaged: wandb starts a new run; the damaged file is kept as %s", note, set_aside(note).name
    )
    return {}


class _WandbLog(Log):
    """A run there, which takes no row back: those that it has got before an interruption are left out."""

    def __init__(self, run: Any, note: Path, last_step: int) -> None:
        self._run, self._note, self._last_step = run, note, last_step

    def write(self, row: Row) -> None:
        if row["step"] <= self._last_step:
            return
        self._run.log(_numbers(row), step=row["step"])
        self._last_step = row["step"]
        with naming(self._note):
            write_text(self._note, json.dumps({"id": self._run.id, "step": self._last_step}), sync=False)

    def close(self) -> None:
        self._run.finish()
