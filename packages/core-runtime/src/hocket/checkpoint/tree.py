"""Nested state, such as an optimizer's `state_dict`, as tensors by name and a structure in JSON; no pickle.

The structure is JSON in which every object has one key, which names the type of value:

| value | structure |
|---|---|
| None, bool, int, finite float, str | itself; floats by their shortest exact text |
| inf, -inf, nan | `{"float": "inf"}` |
| list | a list |
| long list of whole numbers, or of bools | `{"integers": name}`, `{"bools": name}`: the tensor of them |
| long list of floats | `{"floats": name}`: the tensor of their bits |
| tuple | `{"tuple": [...]}` |
| mapping, Counter | `{"dict": [[key, value], ...]}`, `{"counter": ...}`, in their order; keys are values, too |
| tensor | `{"tensor": name}`, with the `stride` of its copies where it is not contiguous |
| complex tensor | `{"complex": name}`, the real and the imaginary part along a last axis |
| tensor made of others (`__tensor_flatten__`) | `{"parts": [module, class, {part: tensor}, context, shape, stride]}` |
| NumPy array | `{"array": name}` |
| deque, set | `{"deque": [[...], its longest]}`, `{"set": [...]}` |
| torch.dtype, torch.device | `{"dtype": "float32"}`, `{"device": "cuda:0"}` |
| bytes, BytesIO | `{"bytes": "..."}`, `{"file": "..."}`, in base64 |

Named tuples become tuples, other mappings dicts, and NumPy's scalars Python's. With `exactly`, for messages, all values
come back as they were, except for the strides of tensors; other types are refused. Then there are, besides:

| value | structure |
|---|---|
| OrderedDict | `{"ordered": [[key, value], ...]}` |
| named tuple | `{"named": [module, name, [...]]}`, of a module that its reader has imported |
| NumPy scalar | `{"scalar": name}`: the tensor of it |
"""

from __future__ import annotations

import base64
import io
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hocket.arrays import Array
from hocket.checkpoint.subclasses import is_composite, join_parts, parts_of
from hocket.errors import CheckpointError, UserError

#: A value that JSON can hold.
JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

_NUMPY_SCALARS = (np.bool_, np.integer, np.float16, np.float32)

#: Lists of so many numbers are stored as tensors: JSON takes more room, and a file can hold only so much of it.
_LONG = 256

#: The lists that are: the types of what they hold, and the dtype that holds all of it.
_NUMBERS: dict[str, tuple[tuple[type, ...], type]] = {
    "bools": ((bool, np.bool_), np.bool_),
    "integers": ((int, np.integer), np.int64),
    "floats": ((float, np.float16, np.float32), np.float64),
}


def flatten(state: object, *, exactly: bool = False) -> tuple[JSON, dict[str, Tensor]]:
    """Take nested state apart.

    Args:
        state: nested values of the types above.
        exactly: require that all types come back as they are.

    Returns:
        The structure, and the tensors by name: the keys and indices that lead to them, joined by `/`. Tensors
        are the given ones, not copies.

    Raises:
        CheckpointError: a value of another type; names its path.
        UserError: the same, with `exactly`.
    """
    flattener = _ExactFlattener() if exactly else _Flattener()
    return flattener.structure(state, ""), flattener.tensors


def unflatten(structure: object, tensor: Callable[[str], Tensor]) -> Any:
    """Put together what `flatten` took apart.

    Args:
        structure: the first result of `flatten`.
        tensor: returns a tensor by name, which becomes a part of the state; called once for each name.
    """
    if isinstance(structure, list):
        return [unflatten(item, tensor) for item in structure]
    if not isinstance(structure, dict):
        return structure
    [kind] = structure.keys() - {"stride"}
    content = structure[kind]
    value: Any
    match kind:
        case "float":
            value = float(content)
        case "tuple":
            value = tuple(unflatten(content, tensor))
        case "bools" | "integers":
            value = tensor(content).tolist()
        case "floats":
            value = tensor(content).view(torch.float64).tolist()
        case "dict" | "counter":
            pairs = ((unflatten(key, tensor), unflatten(item, tensor)) for key, item in content)
            value = dict(pairs) if kind == "dict" else Counter(dict(pairs))
        case "tensor" | "complex":
            value = tensor(content)
            if "stride" in structure:
                value = value.new_empty_strided(value.shape, structure["stride"]).copy_(value)
            if kind == "complex":
                value = torch.view_as_complex(value)
        case "array":
            value = tensor(content).numpy()
        case _:
            value = _object(kind, content, tensor)
    return value


def parts_within(structure: object) -> set[str]:
    """Return the names of tensors that are parts of composite ones, and have no mean of their own."""
    if isinstance(structure, list):
        return {name for item in structure for name in parts_within(item)}
    if not isinstance(structure, dict):
        return set()
    if "parts" in structure:
        return _names_in(structure["parts"][2])
    return {name for content in structure.values() for name in parts_within(content)}


def _names_in(structure: object) -> set[str]:
    if isinstance(structure, dict):
        own = {structure[kind] for kind in ("tensor", "complex") if kind in structure}
        return own.union(*map(_names_in, structure.values()))
    return {name for item in structure for name in _names_in(item)} if isinstance(structure, list) else set()


def _object(kind: str, content: Any, tensor: Callable[[str], Tensor]) -> Any:  # noqa: PLR0911 (one for each kind)
    """Put together objects that optimizers keep besides numbers and tensors."""
    match kind:
        case "deque":
            return deque(unflatten(content[0], tensor), content[1])
        case "set":
            return set(unflatten(content, tensor))
        case "dtype":
            return getattr(torch, content)
        case "device":
            return torch.device(content)
        case "bytes":
            return base64.b64decode(content)
        case "file":
            return io.BytesIO(base64.b64decode(content))
        case "parts":
            module, name, parts, *rest = content
            plain = {part: unflatten(value, tensor) for part, value in parts}
            return join_parts(module, name, plain, *(unflatten(value, tensor) for value in rest))
    return _exactly(kind, content, tensor)


def _exactly(kind: str, content: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Put together objects that only messages hold."""
    match kind:
        case "scalar":
            return tensor(content).numpy()[()]
        case "ordered":
            return OrderedDict((unflatten(key, tensor), unflatten(item, tensor)) for key, item in content)
        case "named":
            module, name, items = content
            return _named(module, name)(*unflatten(items, tensor))
    raise CheckpointError(
        f"this version of Hocket cannot read values of kind {kind!r}: install the version that saved them"
    )


class _Flattener:
    # Methods by name: bound ones would be a cycle, which keeps tensors alive until it is collected.
    _describe: ClassVar[dict[type, str]] = {
        Tensor: "_tensor",
        np.ndarray: "_array",
        list: "_items",
        tuple: "_tuple",
        Counter: "_counter",
        Mapping: "_dict",
        deque: "_deque",
        set: "_set",
        torch.dtype: "_dtype",
        torch.device: "_device",
        bytes: "_bytes",
        io.BytesIO: "_file",
    }

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def structure(self, value: object, path: str) -> JSON:
        if isinstance(value, _NUMPY_SCALARS):
            value = value.item()
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(float(value))}
        for kind, describe in self._describe.items():
            if isinstance(value, kind):
                described: JSON = getattr(self, describe)(value, path)
                return described
        raise CheckpointError(
            f"{path or 'the state'} is of type {type(value).__name__}, which a checkpoint cannot hold; allowed: "
            "tensors, arrays, numbers, text, bytes, dtypes, None, and lists, tuples, sets, deques and mappings of "
            "them"
        )

    def _items(self, values: Sequence[object], path: str) -> JSON:
        if len(values) >= _LONG and (numbers := _numbers(values)) is not None:
            kind, array = numbers
            return {kind: self._name(torch.from_numpy(array), path)}
        return self._each(values, path)

    def _each(self, values: Sequence[object], path: str) -> list[JSON]:
        return [self.structure(value, f"{path}/{i}".lstrip("/")) for i, value in enumerate(values)]

    def _tuple(self, value: tuple[object, ...], path: str) -> dict[str, JSON]:
        return {"tuple": self._items(value, path)}

    def _counter(self, value: Mapping[object, object], path: str) -> dict[str, JSON]:
        return {"counter": self._pairs(value, path)}

    def _dict(self, value: Mapping[object, object], path: str) -> dict[str, JSON]:
        return {"dict": self._pairs(value, path)}

    def _pairs(self, values: Mapping[object, object], path: str) -> list[JSON]:
        return [
            [self.structure(key, f"{path}: a key"), self.structure(value, f"{path}/{key}".lstrip("/"))]
            for key, value in values.items()
        ]

    def _deque(self, value: deque[object], path: str) -> dict[str, JSON]:
        return {"deque": [self._each(list(value), path), value.maxlen]}

    def _set(self, value: set[object], path: str) -> dict[str, JSON]:
        return {"set": self._each(sorted(value, key=repr), path)}

    def _dtype(self, value: torch.dtype, path: str) -> dict[str, JSON]:
        return {"dtype": str(value).removeprefix("torch.")}

    def _device(self, value: torch.device, path: str) -> dict[str, JSON]:
        return {"device": str(value)}

    def _bytes(self, value: bytes, path: str) -> dict[str, JSON]:
        return {"bytes": base64.b64encode(value).decode()}

    def _file(self, value: io.BytesIO, path: str) -> dict[str, JSON]:
        return {"file": base64.b64encode(value.getvalue()).decode()}

    def _composite(self, value: Tensor, path: str) -> dict[str, JSON]:
        parts, context = parts_of(value)
        kind = type(value)
        pairs: list[JSON] = [[name, self.structure(part, f"{path}/{name}")] for name, part in parts.items()]
        rest = [self.structure(each, path) for each in (context, tuple(value.shape), tuple(value.stride()))]
        return {"parts": [kind.__module__, kind.__qualname__, pairs, *rest]}

    def _tensor(self, value: Tensor, path: str) -> dict[str, JSON]:
        if is_composite(value):
            return self._composite(value, path)
        value = value.detach()
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise CheckpointError(
                f"{path} is a {_kind(value)} tensor: only strided tensors that have values and are not quantised can "
                "be saved"
            )
        kind = "complex" if value.is_complex() else "tensor"
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        # The order of axes that torch would give a copy: the same for a dense tensor, else none.
        stride = torch.empty_like(value, device="meta").stride()
        kept: dict[str, JSON] = {} if value.is_contiguous() else {"stride": list(stride)}
        return {kind: self._name(value, path), **kept}

    def _array(self, value: Array, path: str) -> dict[str, JSON]:
        try:
            # A copy: arrays may be read-only, which torch warns of.
            return {"array": self._name(torch.from_numpy(np.array(value, order="C")), path)}
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is an array of dtype {value.dtype}, which torch does not know"
            ) from error

    def _name(self, value: Tensor, path: str) -> str:
        # Not every text is Unicode that a file can hold: names of files that are none, for example.
        path = path.encode(errors="backslashreplace").decode()
        # Keys may hold a slash, and 1 and "1" are different keys with one text.
        while path in self.tensors:
            path += "'"
        self.tensors[path] = value
        return path


class _ExactFlattener(_Flattener):
    """A flattener that refuses values which would come back as another type."""

    def structure(self, value: Any, path: str) -> JSON:
        kind = type(value)
        if value is None or kind in (bool, int, float, str, list, tuple, dict, Counter, np.ndarray):
            return super().structure(value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.bool_ | np.number):
            return {"scalar": self._array(np.array(value), path)["array"]}
        if kind is bytes:
            return self._bytes(value, path)
        if kind is OrderedDict:
            return {"ordered": self._pairs(value, path)}
        if issubclass(kind, tuple) and _is_named(kind, kind.__module__, kind.__qualname__):
            return {"named": [kind.__module__, kind.__qualname__, self._each(value, path)]}
        raise UserError(
            f"{path or 'the value'} is of type {kind.__name__}, which ranks cannot send each other; allowed: "
            "tensors, arrays, numbers, text, bytes, None, and lists, tuples, named tuples of a module and "
            "dictionaries of them"
        )

    def _items(self, values: Sequence[object], path: str) -> JSON:
        of_one_kind = {*map(type, values)} in ({bool}, {int}, {float})
        return super()._items(values, path) if of_one_kind else self._each(values, path)

    def _tensor(self, value: Tensor, path: str) -> dict[str, JSON]:
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise UserError(
                f"{path or 'the value'} is a {_kind(value)} tensor: ranks can send each other only strided tensors "
                "that have values and are not quantised"
            )
        return {"tensor": self._name(value, path)}

    def _array(self, value: Array, path: str) -> dict[str, JSON]:
        try:
            return super()._array(value, path)
        except CheckpointError as error:
            raise UserError(str(error)) from error


def _kind(value: Tensor) -> str:
    """Return the property of a tensor for which it cannot be stored, in a word."""
    return "meta" if value.is_meta else "quantised" if value.is_quantized else str(value.layout)


def _named(module: str, name: str) -> Any:
    """Return the named tuple of that name, of a module that has been imported.

    Raises:
        UserError: there is none.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise UserError(
            f"this rank has not imported the named tuple {module}.{name}: import {module} on all ranks"
        )
    return found


def _is_named(kind: type, module: str, name: str) -> bool:
    try:
        return _named(module, name) is kind
    except UserError:
        return False


def _numbers(values: Sequence[object]) -> tuple[str, Array] | None:
    """Return the kind and the array of a list of numbers of one kind, or None for other lists."""
    found = set(map(type, values))
    for kind, (types, dtype) in _NUMBERS.items():
        if all(
            issubclass(of_value, types) and (of_value is not bool or kind == "bools") for of_value in found
        ):
            try:
                array: Array = np.array(values, dtype)
            except OverflowError:  # more than 64 bits
                return None
            # Floats as their bits: what was a list is no tensor whose mean several ranks' states have.
            return kind, array.view(np.int64) if kind == "floats" else array
    return None
