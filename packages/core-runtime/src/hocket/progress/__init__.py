"""Progress engines, which advance operations while no rank waits for them."""

from hocket.progress.engine import Activity, ProgressEngine
from hocket.progress.executor import Execution
from hocket.progress.inline import InlineProgress
from hocket.progress.thread import ThreadProgress

__all__ = ["Activity", "Execution", "InlineProgress", "ProgressEngine", "ThreadProgress"]
