"""Every hook that Hocket calls: one that registers, one that observes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.plugin.markers import hookspec

if TYPE_CHECKING:
    from hocket.plugin.registrar import Registrar


@hookspec
def hocket_register(registry: Registrar) -> None:
    """Register everything that the plugin provides; called once, when a config first names the plugin.

    Args:
        registry: puts the plugin's word before each name, so `registry.topology("fair_random", FairRandom)`
            of the plugin `crossover` provides `crossover.fair_random`.
    """


@hookspec
def hocket_step_end(session: object, step: int) -> None:
    """Observe the end of a training step, on the training thread.

    Args:
        session: the `hocket.Session` whose step ended; observers change nothing in it.
        step: the step's number, from 0.
    """
