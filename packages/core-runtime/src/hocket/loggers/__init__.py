"""Loggers, which write rows of metrics: to files, TensorBoard, Weights & Biases; several at once, on rank 0."""

from hocket.loggers.api import Log, Logger
from hocket.loggers.files import Csv, JsonLines, read_lines
from hocket.loggers.services import TensorBoard, Wandb

__all__ = ["Csv", "JsonLines", "Log", "Logger", "TensorBoard", "Wandb", "read_lines"]
