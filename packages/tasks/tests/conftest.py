"""What holds for all tests of the package."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says nothing here: other processes share the machine.
settings.register_profile("hocket", deadline=None)
settings.load_profile("hocket")
