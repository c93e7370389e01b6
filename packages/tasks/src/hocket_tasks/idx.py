"""The IDX format, in which MNIST and its successors are distributed.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "File formats":
two zero bytes, a byte for the type (8: unsigned byte), a byte for the number of dimensions, each dimension as
a big-endian 32-bit integer, then the elements in C order.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hocket.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 8


def read_idx(path: Path, num_dims: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, compressed with gzip or plain, whatever its name.

    Args:
        path: the file.
        num_dims: the number of dimensions that it must have, 1 or more.

    Returns:
        A new, writable array, uint8, with the file's dimensions.

    Raises:
        UserError: the file cannot be read, is damaged, is of another format or has another number of
            dimensions, or is shorter or longer than its header says.
    """
    content = _read(path)
    magic = struct.pack(">HBB", 0, _UNSIGNED_BYTE, num_dims)
    if not content.startswith(magic):
        raise UserError(
            f"{path} is not an IDX file of unsigned bytes with {num_dims} dimension(s): "
            f"it starts with {content[:4].hex(' ')!r} instead of {magic.hex(' ')!r}"
        )
    header_bytes = len(magic) + 4 * num_dims
    if len(content) < header_bytes:
        raise UserError(
            f"{path} is truncated: it has {len(content)} bytes, and a header alone has {header_bytes}"
        )
    dims = struct.unpack_from(f">{num_dims}I", content, len(magic))
    expected_bytes = header_bytes + math.prod(dims)
    if len(content) != expected_bytes:
        what = "truncated" if len(content) < expected_bytes else "too long"
        raise UserError(
            f"{path} is {what}: its header, with dimensions {dims}, promises {expected_bytes} bytes, but there are "
            f"{len(content)}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(dims).copy()


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
