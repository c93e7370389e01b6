"""The interface of loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hocket.configured import Configured

__all__ = ["Log", "Logger", "Row"]

#: Metrics of one step by name, `step` among them: numbers, texts, None, and lists of such.
Row = Mapping[str, Any]


class Log(ABC):
    """Rows of metrics that are being written."""

    @abstractmethod
    def write(self, row: Row) -> None:
        """Add a row; whoever looks at once finds it."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


class Logger(Configured, ABC):
    """Where rows of metrics go; a frozen dataclass whose fields are its configuration.

    Attributes:
        files: the names of what it writes into the folder of the results; where somebody else has put such a file
            there, nothing is written.
    """

    files: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Refuse, before anything is trained, what cannot be written.

        Raises:
            UserError: a library that it needs is not installed; says how it is.
        """

    @abstractmethod
    def open(self, folder: Path, config: Mapping[str, Any], resumed_after: int | None) -> Log:
        """Begin to write.

        Args:
            folder: of the results, which exists.
            config: of the run, as plain values.
            resumed_after: the step after which a run goes on: rows of later steps that were written before it was
                interrupted are written once more, and stand there once. None for a run that begins anew, in the place
                of what an earlier one has left in the folder.
        """
