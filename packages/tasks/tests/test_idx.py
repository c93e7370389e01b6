from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from hocket.errors import UserError
from hocket_tasks.idx import read_idx


def encode(array: NDArray[np.uint8], kind: int = 8) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx") / "samples"


@given(npst.arrays(np.uint8, npst.array_shapes(max_dims=4, min_side=0)), st.booleans())
def test_reads_what_was_written_compressed_or_plain(
    path: Path, array: NDArray[np.uint8], compressed: bool
) -> None:
    content = encode(array)
    path.write_bytes(gzip.compress(content) if compressed else content)

    read = read_idx(path, num_dims=array.ndim)

    assert read.dtype == np.uint8
    assert read.flags.writeable
    np.testing.assert_array_equal(read, array)


@given(npst.arrays(np.uint8, (3, 2)), st.data())
def test_truncated_anywhere_is_refused(path: Path, array: NDArray[np.uint8], data: st.DataObject) -> None:
    content = encode(array)
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])

    with pytest.raises(UserError, match=r"samples is (truncated|not an IDX file)"):
        read_idx(path, num_dims=2)


def test_truncated_says_what_is_missing(path: Path) -> None:
    path.write_bytes(encode(np.zeros((3, 2), np.uint8))[:-1])
    with pytest.raises(UserError, match=r"dimensions \(3, 2\), promises 18 bytes, but there are 17"):
        read_idx(path, num_dims=2)


def test_bytes_beyond_the_end_are_refused(path: Path) -> None:
    path.write_bytes(encode(np.zeros((3, 2), np.uint8)) + b"\0")
    with pytest.raises(UserError, match=r"too long: .* promises 18 bytes, but there are 19"):
        read_idx(path, num_dims=2)


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (encode(np.zeros((3, 2), np.uint8), kind=13), "00 00 0d 02"),
        (encode(np.zeros(6, np.uint8)), "00 00 08 01"),
        (b"\x89PNG and more", "89 50 4e 47"),
        (b"", ""),
    ],
    ids=["floats", "one dimension", "another format", "empty"],
)
def test_wrong_magic_is_shown(path: Path, content: bytes, start: str) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"it starts with '{start}' instead of '00 00 08 02'"):
        read_idx(path, num_dims=2)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damaged_compression_is_refused(path: Path, damage: str) -> None:
    content = gzip.compress(encode(np.arange(200, dtype=np.uint8)))
    flipped = bytearray(content)
    flipped[-6] ^= 0xFF  # within the checksum
    path.write_bytes(content[:-20] if damage == "truncated" else bytes(flipped))
    with pytest.raises(UserError, match="samples cannot be read"):
        read_idx(path, num_dims=1)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing cannot be read: .*No such file"):
        read_idx(tmp_path / "nothing", num_dims=1)
