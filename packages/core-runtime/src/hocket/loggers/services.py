"""Loggers that other programs show."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hocket.disk import write_text
from hocket.errors import UserError
from hocket.installing import how_to_install
from hocket.loggers.api import Log, Logger, Row
from hocket.own_files import set_aside

__all__ = ["TensorBoard", "Wandb", "WandbMode"]

_log = logging.getLogger("hocket")


#: What the names of Hocket's own event files end in, so that it removes no others.
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

    def open(self, folder: Path, config: Mapping[str, Any], resumed_after: int | None) -> Log:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        if resumed_after is None:
            for earlier in place.glob(f"events.out.tfevents.*{_OWN}"):
                earlier.unlink()
            writer = SummaryWriter(place, filename_suffix=_OWN)
            writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```")
        else:
            writer = SummaryWriter(place, purge_step=resumed_after + 1, filename_suffix=_OWN)
        return _TensorBoardLog(writer)


class _TensorBoardLog(Log):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, row: Row) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbMode(StrEnum):
    """Whether rows are sent as they come, or kept in the folder until `wandb sync`."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True)
class Wandb(Logger):
    """Weights & Biases, in the folder `wandb`.

    Attributes:
        project: of the run there.
        mode: `online`, or `offline` for `wandb sync` later; null for what WANDB_MODE says, else `online`.
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

    def open(self, folder: Path, config: Mapping[str, Any], resumed_after: int | None) -> Log:
        import wandb

        note = folder / "wandb.json"
        told = _read_note(note) if resumed_after is not None and note.exists() else {}
        run = wandb.init(
            project=self.project,
            name=config.get("name"),
            id=told.get("id"),
            resume="allow" if told else None,
            dir=folder,
            mode=None if self.mode is None else self.mode.value,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        return _WandbLog(run, note, told.get("step", -1))


def _read_note(note: Path) -> dict[str, Any]:
    """Return which run there goes on, and after which step; nothing where the note is damaged."""
    try:
        told = json.loads(note.read_bytes())
        if isinstance(told["id"], str) and type(told["step"]) is int:
            return dict(told)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    _log.warning("%s is damaged: a new run of wandb begins; it is kept as %s", note, set_aside(note).name)
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
        write_text(self._note, json.dumps({"id": self._run.id, "step": self._last_step}), sync=False)

    def close(self) -> None:
        self._run.finish()
