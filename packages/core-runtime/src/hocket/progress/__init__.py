"""Who advances exchanges that only move when somebody looks at them, and who carries out schedules."""

from hocket.progress.api import ProgressEngine
from hocket.progress.inline import InlineProgress
from hocket.progress.run import RoundRequest, Run
from hocket.progress.thread import ThreadProgress

__all__ = ["InlineProgress", "ProgressEngine", "RoundRequest", "Run", "ThreadProgress"]
