"""Loops that NumPy would walk through memory several times, compiled by Numba.

Importing this package imports Numba (a sixth of a second; a compiled function's first call takes another third, from
its cache), so it is imported where the first of them is called. All run on the calling thread alone, without the GIL.
"""

from hocket.kernels.copying import merge_delayed, scaled_copy
from hocket.kernels.mixing import Mix

__all__ = ["Mix", "merge_delayed", "scaled_copy"]
