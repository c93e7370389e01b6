"""Text as one line of ASCII: the King James Bible as Debian's package bible-kjv-text ships it, or any other.

The package's file has the text in blocks of 64 KiB behind a table of big-endian offsets; each block is what `compress`
writes, but for the three bytes of its header.

Source: T. Welch, "A Technique for High-Performance Data Compression", Computer 17(6), 1984 (LZW), with codes of 9 bits
and, as the table of strings grows, more.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hocket.errors import UserError
from hocket_tasks.saved_datasets import columns_of, is_saved

#: The place of the package's text.
FILE = "/usr/lib/bible.data"

_TABLE_AT = 0x58
_WIDTH, _CLEAR = 9, 256  # a code's first number of bits, and the code that clears the table
# Project Gutenberg's book between its own words, the numbers of verses, and printers' signs.
_GUTENBERG = re.compile(
    r"\*\*\* ?START OF TH[^*]*PROJECT GUTENBERG[^*]*\*\*\*(.*?)\*\*\* ?END OF TH[^*]*PROJECT GUTENBERG",
    re.DOTALL,
)
_NUMBER = re.compile(r"(?<!\S)\d+:\d+(?!\S)")
_PUNCTUATION = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--"}
)
_VERSE = re.compile(rb"^\w+:\d+ (.+)$", re.MULTILINE)


@lru_cache(maxsize=1)  # the virtual ranks of one process share one copy
def read_verses(path: str) -> bytes:
    """Return a text as ASCII, with single spaces between words and without verses' numbers; the Bible's has 4 MB.

    Args:
        path: the package's bible.data; a plain text in UTF-8, of which Project Gutenberg's preface and licence are
            left out; or a folder that the library datasets has written, whose column `text` is read.

    Raises:
        UserError: there is none, or it is none of these; the error names each way to get one.
    """
    place = Path(path).expanduser()
    if is_saved(place):
        (lines,) = columns_of(place, "task.file", None, ("text",))
        return _plain(path, "\n".join(lines))
    try:
        data = place.read_bytes()
    except OSError as error:
        raise UserError(
            f"task.file: {path} cannot be read: {error.strerror}. Install it with `apt install bible-kjv-text`, or "
            "set task.file to that package's bible.data, to a plain text, such as "
            "https://www.gutenberg.org/ebooks/10.txt.utf-8, or to a folder written by save_to_disk of the library "
            "datasets, with a column `text`"
        ) from error
    if b"\0" not in data:
        try:
            return _plain(path, data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"task.file: {path} is not UTF-8 text: {error.reason} at byte {error.start}"
            ) from error
    return _verses(path, data)


def _plain(path: str, text: str) -> bytes:
    """Return a plain text's words, what is not ASCII written in ASCII or left out."""
    found = _GUTENBERG.search(text)
    words = _NUMBER.sub(" ", (found[1] if found else text).translate(_PUNCTUATION))
    plain = " ".join(unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode().split())
    if not plain:
        raise UserError(f"task.file: {path} holds no ASCII text")
    return plain.encode()


def _verses(path: str, data: bytes) -> bytes:
    """Return the verses of the package's file."""
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
