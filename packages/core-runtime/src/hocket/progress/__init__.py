"""Who advances exchanges that only move when somebody looks at them."""

from hocket.progress.api import ProgressEngine
from hocket.progress.inline import InlineProgress

__all__ = ["InlineProgress", "ProgressEngine"]
