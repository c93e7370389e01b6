"""The folder of a run's results: the names of its files, its configuration, starts and rows of metrics."""

from hocket.checkpoint import MODEL

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "HELD_OUT",
    "METRICS",
    "MODEL",
    "NEXT_CONFIG",
    "NEXT_START",
    "PICTURE",
    "RECORDINGS",
    "REPORT",
    "SOURCE",
    "STARTS",
    "SUMMARY",
    "SWEPT_CONFIG",
    "TRACE_FILE",
    "TRAIN_LOSS",
    "VALID",
]

#: The names of files in the folder of a run's results: its complete configuration, and that of a run that has not begun
#: to train yet; its starts, likewise; the file from which a sweep starts it; and its results.
CONFIG = "config.yaml"
NEXT_CONFIG = "config.next.yaml"
STARTS = "run.json"
NEXT_START = "run.next.json"
SWEPT_CONFIG = "run.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
PICTURE = "metrics.png"
REPORT = "report.html"

#: The name of a run's trace in the folder of its results.
TRACE_FILE = "trace.json.gz"

#: The folder of the ranks' recordings, from which the trace is made, there.
RECORDINGS = "trace-recordings"

#: The folders of a run's checkpoints, and of copies of the user's own modules, in the folder of its results.
CHECKPOINTS = "checkpoints"
SOURCE = "source"

#: The mean loss over the samples that were trained on since the last line of metrics.
TRAIN_LOSS = "train_loss"

#: The prefix of the loss and metrics on held-out samples in a run's results.
VALID = "valid_"

#: The first words of such names in scripts, whose frameworks and authors have their own.
HELD_OUT = ("valid", "val", "validation", "eval", "test")
