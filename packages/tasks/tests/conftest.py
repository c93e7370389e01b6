"""What holds for all tests of the package."""

from __future__ import annotations
