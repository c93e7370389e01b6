"""The checkpoint of a Trainer whose job is asked to end."""

from __future__ import annotations

from functools import partial
from typing import Any

from hocket_lightning.frameworks import lightning


class SaveAtLast(lightning("pytorch.callbacks").Callback):  # type: ignore[misc]
    """A callback that saves once on SIGTERM or SIGUSR1, after a common step, where `ckpt_path="last"` looks.

    Args:
        strategy: a TrainerStrategy whose session trains.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def on_train_start(self, trainer: Any, *given: Any) -> None:
        """Listen from now on, in place of Lightning, whose ranks would end after different steps; collective."""
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        save = partial(self._strategy.save_at_last, f"{folder}/last-signal.ckpt")
        self._end_if_asked = self._strategy.session.save_on_signal(save, unless_handled=True)

    def on_train_batch_end(self, *given: Any) -> None:
        """Save and end, if all ranks have reached the step."""
        self._end_if_asked()
