"""The two pluggy markers: `hookimpl` for plugins, `hookspec` for Hocket itself."""

from __future__ import annotations

import pluggy

#: The pluggy project, and the entry-point group in which plugins announce themselves.
PROJECT = "hocket"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
