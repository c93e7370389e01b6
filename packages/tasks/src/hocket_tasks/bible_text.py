"""The King James Bible as Debian's package bible-kjv-text ships it, read into memory.

The file has the text in blocks of 64 KiB behind a table of big-endian offsets; each block is what `compress` writes,
but for the three bytes of its header.

Source: T. Welch, "A Technique for High-Performance Data Compression", Computer 17(6), 1984 (LZW), with codes of 9 bits
and, as the table of strings grows, more.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hocket.api import UserError

__all__ = ["FILE", "read_verses"]

#: Where the package has its text.
FILE = "/usr/lib/bible.data"

_TABLE_AT = 0x58
_WIDTH, _CLEAR = 9, 256  # a code's first number of bits, and the code that clears the table
_VERSE = re.compile(rb"^\w+:\d+ (.+)$", re.MULTILINE)


@lru_cache(maxsize=1)  # the virtual ranks of one process share one copy
def read_verses(path: str) -> bytes:
    """Return the verses as one ASCII text of 4 MB, with a space between them and without their numbers.

    Raises:
        UserError: the file is not there, or another one; names the package that has it.
    """
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UserError(
            f"task.file: {path} cannot be read: {error.strerror}. Install it with `apt install bible-kjv-text`, or set "
            "task.file to where that package's bible.data is"
        ) from error
    try:
        [num_blocks] = struct.unpack_from(">I", data, _TABLE_AT)
        starts = [*struct.unpack_from(f">{num_blocks}I", data, _TABLE_AT + 4), len(data)]
        text = b"".join(_decompressed(data[start:stop]) for start, stop in pairwise(starts))
    except (struct.error, IndexError) as error:
        raise UserError(f"task.file: {path} is not the bible.data of Debian's bible-kjv-text") from error
    verses = b" ".join(_VERSE.findall(text))
    if not verses.isascii() or not verses:
        raise UserError(f"task.file: {path} holds no verses in ASCII, as bible.data of bible-kjv-text does")
    return verses


def _decompressed(block: bytes) -> bytes:
    """Return the text of an LZW stream.

    Raises:
        IndexError: it is no such stream.
    """
    bits = np.unpackbits(np.frombuffer(block, dtype=np.uint8), bitorder="little")
    pieces = []
    while len(bits) >= _WIDTH:
        codes, bits = _codes(bits)
        strings = [bytes([byte]) for byte in range(_CLEAR)] + [b""]
        before = b""
        for code in codes:
            piece = strings[code] if code < len(strings) else before + before[:1]
            if before:
                strings.append(before + piece[:1])
            pieces.append(piece)
            before = piece
    return b"".join(pieces)


def _codes(bits: NDArray[np.uint8]) -> tuple[list[int], NDArray[np.uint8]]:
    """Return the codes up to the next one that clears the table, and the bits after it.

    The table's growth has 2**8 codes of 9 bits come first, then 2**9 of 10, and so on, each the lowest bit first. They
    stand in groups of eight, the last of which is filled up where the table is cleared.
    """
    codes: list[int] = []
    width = _WIDTH
    while len(bits) >= width:
        num = min(2 ** (width - 1), len(bits) // width)
        found = (bits[: num * width].reshape(num, width) @ (1 << np.arange(width))).tolist()
        if _CLEAR in found:
            num = found.index(_CLEAR)
            return codes + found[:num], bits[(num // 8 + 1) * 8 * width :]
        codes += found
        bits = bits[num * width :]
        width += 1
    return codes, bits[:0]
