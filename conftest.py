"""What holds for every package's tests."""

from __future__ import annotations

from hypothesis import settings

from hocket.training.startup import defer_dynamo

# How long an example takes says nothing here: other processes share the machine.
settings.register_profile("hocket", deadline=None)
settings.load_profile("hocket")

# The tests' own processes start a second earlier, too.
defer_dynamo()
