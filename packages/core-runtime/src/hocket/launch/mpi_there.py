"""The check that mpi4py can be used, without starting MPI."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def why_no_mpi4py() -> str | None:
    """Return why mpi4py cannot be used: empty if it is not installed; None if it can be.

    Its package alone is imported: MPI would start with `mpi4py.MPI`.
    """
    if find_spec("mpi4py") is None:
        return ""
    try:
        import mpi4py  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
