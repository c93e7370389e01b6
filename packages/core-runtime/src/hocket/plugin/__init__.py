"""Plugins: their discovery, loading and registration.

A plugin is a distribution with an entry point in the group `hocket`, whose name is the plugin's word and
which names a module with one function:

    from hocket.api import Registrar, hookimpl

    @hookimpl
    def hocket_register(registry: Registrar) -> None:
        registry.topology("fair_random", "hocket_crossover.fair_random:FairRandom")

`hocket.api` has all that a plugin may import besides `hocket` itself, `hocket.errors` and `hocket.testing`.
"""

from hocket.plugin.discovery import CORE, KNOWN_WORDS, Plugin
from hocket.plugin.kinds import Kind
from hocket.plugin.markers import hookimpl
from hocket.plugin.registrar import Benchmark, RecipeFile, Registrar, Registration
from hocket.plugin.registry import Registry, default_registry

__all__ = [
    "CORE",
    "KNOWN_WORDS",
    "Benchmark",
    "Kind",
    "Plugin",
    "RecipeFile",
    "Registrar",
    "Registration",
    "Registry",
    "default_registry",
    "hookimpl",
]
