"""A whole training run of a task: the loop, its measurements and its reports."""

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
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

#: The names of files in the folder of a run's results: its complete configuration, that of a run that has not begun to
#: train yet, likewise what started it, what a sweep starts a run from, and what a run has given.
CONFIG = "config.yaml"
NEXT_CONFIG = "config.next.yaml"
STARTS = "run.json"
NEXT_START = "run.next.json"
SWEPT_CONFIG = "run.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
PICTURE = "metrics.png"
REPORT = "report.html"

#: What the trace of a run is called in the folder of its results.
TRACE_FILE = "trace.json.gz"

#: The folder of what becomes a trace, there.
RECORDINGS = "trace-recordings"

#: The folders of a run's checkpoints, and of the user's modules that it is of, in the folder of its results.
CHECKPOINTS = "checkpoints"
SOURCE = "source"

#: The mean loss over the samples that were trained on since the last line of metrics.
TRAIN_LOSS = "train_loss"

#: What the names of loss and metrics on held-out samples begin with in a run's results.
VALID = "valid_"
