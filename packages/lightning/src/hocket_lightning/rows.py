"""The rows of a run's folder, from what a LightningModule logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket import Session
from hocket_lightning.frameworks import lightning


class RowsOfRun(lightning("pytorch.loggers").Logger):  # type: ignore[misc]
    """A logger that writes the folder of `hocket launch --out` or `HocketStrategy(..., out=...)`.

    Args:
        session: writes the rows.
        save_dir: the folder of Lightning's own files.
    """

    name = "hocket"
    version = ""
    save_dir = None

    def __init__(self, session: Session, save_dir: str) -> None:
        super().__init__()
        self.experiment = session  # as other loggers name what writes
        self.save_dir = save_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row, with the number of the session's steps."""
        self.experiment.log(metrics)

    def log_hyperparams(self, *given: Any, **named: Any) -> None:
        """Leave hyperparameters out, as the folder has the script's arguments."""
