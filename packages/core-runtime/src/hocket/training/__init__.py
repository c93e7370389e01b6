"""A whole training run of a task: the loop, its measurements and its reports."""
