"""Core's collectives on virtual ranks, against NumPy."""

from __future__ import annotations

import cases

for _case in cases.CASES:
    globals()[f"Test{_case.__name__}"] = type(f"Test{_case.__name__}", (_case,), {})
