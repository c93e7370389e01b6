"""Hocket's strategies for Lightning: `HocketStrategy` for its Trainer; `hocket_lightning.fabric` has Fabric's."""

from __future__ import annotations

from typing import Any

__all__ = ["HocketStrategy"]


def HocketStrategy(  # noqa: N802
    strategy: str = "agd", *overrides: str, blocking_saves: bool = True, **options: Any
) -> Any:
    """Return the strategy of a Trainer whose ranks exchange as a Hocket strategy says; collective.

    Any launcher starts the ranks. After `fit` every rank's model is the replicas' mean.

    Args:
        strategy, overrides: as `hocket.compose` takes them.
        blocking_saves: whether training waits until a checkpoint's state of the ranks is written; else, as for
            `session.save`, a thread writes a copy in host memory, and a checkpoint that another replaces stays until
            that one is complete.
        options: as `hocket.attach` takes them: `on_nonfinite`, `statistics`, ...

    Returns:
        A `Strategy` of Lightning's, with `session`: Hocket's session while the model trains, else None.

    Raises:
        UserError: the strategy cannot be composed, or Lightning is not installed.
    """
    # Late, as only now it shows whether the script uses `lightning` or `pytorch_lightning`.
    from hocket_lightning.trainer import TrainerStrategy

    return TrainerStrategy(strategy, *overrides, blocking_saves=blocking_saves, **options)
