"""The strategy of Lightning's Fabric: `Fabric(strategy=HocketStrategy("agd"))`."""

from __future__ import annotations

from typing import Any


def HocketStrategy(strategy: str = "agd", *overrides: str, **options: Any) -> Any:  # noqa: N802
    """Return the strategy of a Fabric whose ranks exchange as a Hocket strategy says; collective.

    Any launcher starts the ranks. `fabric.setup(model, optimizer)` attaches, and `fabric.strategy.session.close()` ends
    training.

    Args:
        strategy, overrides: as `hocket.compose` takes them.
        options: as `hocket.attach` takes them: `on_nonfinite`, `statistics`, ...

    Returns:
        A `Strategy` of Fabric's, with `session`: Hocket's session, from `fabric.setup(model, optimizer)` on.

    Raises:
        UserError: the strategy cannot be composed, or Lightning is not installed.
    """
    # Late, as only now it shows whether the script uses `lightning` or `lightning_fabric`.
    from hocket_lightning.loop import FabricStrategy

    return FabricStrategy(strategy, *overrides, **options)
