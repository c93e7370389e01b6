"""Whether mpi4py is there to be used, found out without a start of MPI."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

__all__ = ["why_no_mpi4py"]


@cache
def why_no_mpi4py() -> str | None:
    """Return why ranks cannot meet by mpi4py: empty where it is not installed; None where nothing is in the way.

    Its package alone is imported: MPI would start with `mpi4py.MPI`.
    """
    if find_spec("mpi4py") is None:
        return ""
    try:
        import mpi4py  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
