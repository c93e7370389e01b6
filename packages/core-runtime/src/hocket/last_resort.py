"""Warnings on standard error, as `hocket: warning: ...`, if the application sets up no logging of its own."""

from __future__ import annotations

import logging
import sys


class LastResort(logging.Handler):
    """A handler that prints records without another handler, as `logging.lastResort` does, with their source.

    Args:
        logger: the logger whose records it prints.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless the logger or the root has a handler of the application's."""
        if len(self._logger.handlers) > 1 or (self._logger.propagate and logging.getLogger().handlers):
            return
        print(f"hocket: {record.levelname.lower()}: {self.format(record)}", file=sys.stderr, flush=True)
