"""Safetensors files of one rank's state each: tensors by name, the rest as JSON metadata.

Source of the format: https://huggingface.co/docs/safetensors (an 8-byte length, a JSON header, the data). Files are
read with its library. They are written here, tensor after tensor, as the library wants all of them in host memory
at once and refuses views of one flat buffer that it cannot tell apart.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.checkpoint.host_copies import bytes_of
from hocket.checkpoint.tree import flatten, unflatten
from hocket.disk import write_durably
from hocket.errors import CheckpointError, DamagedError, MissingFileError
from hocket.plain import Tree, TreeView

#: The name of each dtype that a file can hold.
CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}

_DTYPES = {code: str(dtype).removeprefix("torch.") for dtype, code in CODES.items()}

#: The section with the names of tensors that are equal on all ranks, and in rank 0's file alone.
LEFT = "left"

#: The metadata's keys.
_STRUCTURE, _RUN = "hocket", "run"

#: The longest header that the library reads.
_MOST_HEADER_BYTES = 100_000_000


#: Bytes that are read at once.
_CHUNK_BYTES = 1 << 24


class Prepared(NamedTuple):
    """The content of a file that is to be written.

    Attributes:
        header: the bytes before the tensors'.
        tensors: in the order of the file; or copies of their bytes, in pieces of any size.
    """

    header: bytes
    tensors: Sequence[Tensor]


class Written(NamedTuple):
    """The size and checksum of a written file, by which damage is noticed.

    Attributes:
        size: in bytes.
        checksum: CRC-32 of all of it.
    """

    size: int
    checksum: int


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape in words, such as `float32[3, 4]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def write_state(path: Path, state: TreeView, run: str = "") -> Written:
    """Write nested state into a file durably and check that it reads back; copies one tensor at a time.

    Args:
        path: the file, replaced if it exists.
        state: sections of state that `flatten` takes, by name.
        run: the id of the run that saves.

    Raises:
        CheckpointError: a value cannot be saved or read back.
        OSError: the file cannot be written.
    """
    return write_prepared(path, prepare(state, run))


def prepare(state: TreeView, run: str = "") -> Prepared:
    """Return the content of a file with nested state; its tensors are those of the state, not copies.

    Args:
        state: sections of state that `flatten` takes, by name.
        run: the id of the run that saves.

    Raises:
        CheckpointError: a value cannot be saved.
    """
    try:
        structure, tensors = flatten(state)
        metadata = {_STRUCTURE: json.dumps(structure), _RUN: run}
    except (RecursionError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint cannot be saved: a value in its state cannot be written as JSON ({error}): use a smaller "
            "number or less nesting, or store it as a tensor"
        ) from error
    ordered = in_order(tensors)
    header = _header(ordered, metadata)
    if len(header) > _MOST_HEADER_BYTES:
        raise CheckpointError(_too_long(len(header), structure))
    return Prepared(header, list(ordered.values()))


def write_prepared(path: Path, prepared: Prepared) -> Written:
    """Write a prepared file durably, and check that it reads back.

    Args:
        path: the file, replaced if it exists.
        prepared: its content.

    Raises:
        CheckpointError: it cannot be read back.
        OSError: the file cannot be written.
    """
    checksum = 0

    def write(file: BinaryIO) -> None:
        nonlocal checksum
        checksum = _write(file, prepared.header, prepared.tensors)

    size = write_durably(path, write)
    with StateFile(path):
        return Written(size, checksum)


def write_tensors(
    path: Path,
    forms: Mapping[str, Tensor],
    value: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors by name into a file, durably; at most one of them is copied at a time.

    Args:
        path: the file, replaced if it exists.
        forms: tensors of the dtypes and shapes to be written, by name.
        value: returns a tensor by name; called once for each, in the order of `in_order`.
        metadata: texts by name, in the header.

    Raises:
        CheckpointError: a tensor of a dtype that cannot be saved.
        OSError: the file cannot be written.
    """
    header = _header(in_order(forms), metadata or {})
    write_durably(path, lambda file: _write(file, header, map(value, in_order(forms))))


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in their order in a file, so that each lies at a multiple of its element's size."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: Tree = {"__metadata__": metadata}
    end = 0
    for name in tensors:
        value = tensors[name]
        if value.dtype not in CODES:
            raise CheckpointError(f"{name} is {value.dtype}, which a checkpoint cannot hold: convert it")
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {
            "dtype": CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def _too_long(size: int, structure: object) -> str:
    """Return the error for a header of `size` bytes, with the key that has most of it."""
    keys = []
    while isinstance(structure, dict) and structure.get("dict"):
        key, structure = max(structure["dict"], key=lambda pair: len(json.dumps(pair[1])))
        keys.append(str(key))
    return (
        f"{'/'.join(keys)} makes up most of {size} bytes of text, but a file holds at most {_MOST_HEADER_BYTES} bytes "
        "besides tensors: keep it as a tensor, an array, or a list of only integers or only floats"
    )


def _write(file: BinaryIO, header: bytes, tensors: Iterable[Tensor]) -> int:
    """Write all of a file; return its checksum."""
    start = len(header).to_bytes(8, "little") + header
    file.write(start)
    checksum = zlib.crc32(start)
    for tensor in tensors:
        data = bytes_of(tensor.to("cpu")).numpy().data
        file.write(data)
        checksum = zlib.crc32(data, checksum)
    return checksum


class StateFile:
    """A file that `write_state` has written, read section by section, tensor by tensor.

    Args:
        path: the file's path.
        first: opens the file of rank 0, which holds what other ranks' leave to it (`LEFT`), where it is needed; None
            for rank 0's own.

    Attributes:
        path: the file's path.
        run: the id of the run that saved it.
        left: names of tensors that are in rank 0's file alone.

    Raises:
        DamagedError: the file is missing or incomplete.
    """

    def __init__(self, path: Path, first: Callable[[], StateFile] | None = None) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            metadata = self._file.metadata() or {}
            structure, self.run = json.loads(metadata[_STRUCTURE]), metadata[_RUN]
            self._sections: Tree = dict(structure["dict"])
        except FileNotFoundError as error:
            raise MissingFileError(f"{path} is missing") from error
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise DamagedError(f"{path} is damaged, or does not hold a rank's state: {error}") from error
        self._own = set(self._file.keys())
        self.left: list[str] = self.read(LEFT) if LEFT in self._sections else []
        self._first = first() if first is not None and self.left else None
        self._names: list[str] = [*self._file.keys(), *(self.left if self._first is not None else ())]

    def check_content(self, expected: int) -> None:
        """Read the whole file, and check that it is as it was written.

        Args:
            expected: the CRC-32 of the written file.

        Raises:
            DamagedError: a bit of it has changed.
        """
        found = 0
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found = zlib.crc32(chunk, found)
        if found != expected:
            raise DamagedError(
                f"{self.path} has changed since it was written (checksum {found:08x}, expected "
                f"{expected:08x}): a disk or a copy has damaged this rank's state"
            )

    def structure(self, section: str) -> object:
        """Return a section's structure, which two states share if they differ in tensors alone."""
        return self._sections[section]

    def keys(self, section: str) -> list[str]:
        """Return the keys of a section that is a mapping by text."""
        return [key for key, _ in self._sections[section]["dict"]]

    def names(self, section: str) -> list[str]:
        """Return the names of a section's tensors."""
        return [name for name in self._names if name.partition("/")[0] == section]

    def describe(self, name: str) -> str | None:
        """Return a tensor's dtype and shape in words, or None if there is no such tensor."""
        if name not in self._names:
            return None
        if name not in self._own and self._first is not None:
            return self._first.describe(name)
        part = self._file.get_slice(name)
        return f"{_DTYPES.get(part.get_dtype(), part.get_dtype())}{list(part.get_shape())}"

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, on the CPU; memory of its own, which outlives the file."""
        if name not in self._own and self._first is not None:
            return self._first.tensor(name)
        value: Tensor = self._file.get_tensor(name)
        return value.clone()

    def read(self, section: str, tensor: Callable[[str], Tensor] | None = None) -> Any:
        """Return a section's content.

        Args:
            section: a key of the written state.
            tensor: returns tensors by name; None to take them from this file.
        """
        return unflatten(self._sections[section], tensor or self.tensor)

    def __enter__(self) -> StateFile:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
