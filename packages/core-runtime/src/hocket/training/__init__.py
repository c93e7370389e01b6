"""A whole training run of a task: the loop, its measurements and its reports."""

__all__ = ["CHECKPOINTS", "TRACE_FILE"]

#: What the trace of a run is called in the folder of its results.
TRACE_FILE = "trace.json"

#: The folder of a run's checkpoints in the folder of its results.
CHECKPOINTS = "checkpoints"
