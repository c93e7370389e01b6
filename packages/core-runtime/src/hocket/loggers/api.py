"""The interface of loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from hocket.configured import Configured
from hocket.plain import TreeView

#: Metrics of one step by name, `step` among them: numbers, texts, None, and lists of such.
Row = TreeView


class Log(ABC):
    """Rows of metrics that are being written."""

    @abstractmethod
    def write(self, row: Row) -> None:
        """Add a row, which readers find at once."""

    @abstractmethod
    def close(self) -> None:
        """Write the remaining rows, and close."""


class Logger(Configured, ABC):
    """A destination of rows of metrics; a frozen dataclass whose fields are its configuration.

    Attributes:
        files: the names of the files that it writes into the folder of the results. If that holds such a file
            which Hocket has not written, nothing is written.
    """

    files: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Refuse, before training begins, a logger that cannot write.

        Raises:
            UserError: a library that it needs is not installed; says how to install it.
        """

    @abstractmethod
    def open(self, folder: Path, config: TreeView, resumed_after: int | None) -> Log:
        """Begin to write.

        Args:
            folder: the folder of the results, which exists.
            config: the run's configuration, as plain values.
            resumed_after: the step after which a run goes on; rows of later steps, from before the interruption, are
                written again and must stand there once. None for a run that begins anew and replaces an earlier one's
                files.
        """
