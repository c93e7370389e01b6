"""Compiled operations on one cache line of floats at a time, in memory that is known by its address.

It names vector instructions: where written memory may be read, a compiler that chooses its own falls back to an element
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing import Context, Signature

    from hocket.kernels.compiling import Intrinsic

#: Bytes of a cache line.
LINE_BYTES = 64

#: How far ahead of what they read the functions below fetch vectors: processors foresee less of many than of one.
AHEAD_BYTES = 1024

_INDEX = ir.IntType(64)
_BYTES = ir.VectorType(_INDEX, LINE_BYTES // 8)


def _at(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def _store(builder: ir.IRBuilder, line: ir.Value, address: ir.Value, *, streams: bool, align: int) -> None:
    store = builder.store(line, _at(builder, address, line.type), align=LINE_BYTES if streams else align)
    if streams:
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@intrinsic
def stream_line(typing: Context, to: types.Type, source: types.Type) -> Intrinsic:
    """Copy 64 bytes from address `source` to address `to`, a multiple of 64, around the caches.

    An ordinary store reads a line into the cache before it changes it, which costs memory half as much again. Other
    cores may rely on the write only after `fence`.
    """

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        target, origin = arguments
        line = builder.load(_at(builder, origin, _BYTES), align=8)
        _store(builder, line, target, streams=True, align=8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def copy_line(typing: Context, to: types.Type, source: types.Type, number: types.Type) -> Intrinsic:
    """Copy line `number` of the vector at address `source` to the same line of the one at `to`."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        target, origin, number = arguments
        offset = builder.mul(number, _INDEX(LINE_BYTES))
        line = builder.load(_at(builder, builder.add(origin, offset), _BYTES), align=4)
        _store(builder, line, builder.add(target, offset), streams=False, align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), generate


@intrinsic
def scaled_line(
    typing: Context,
    to: types.Type,
    at: types.Type,
    factor: types.Type,
    number: types.Type,
    streams: types.Type,
) -> Intrinsic:
    """Write line `number` of factor * vector; return 0 if the vector's line holds neither NaN nor Inf.

    Args:
        to: address of the result, which may be that of the vector.
        at: address of the vector.
        factor: of the vector's dtype, float32 or float64.
        number: int64; a line is 64 bytes.
        streams: whether to write around the caches; `to` is then a multiple of 64. See `stream_line`.
    """

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        to, at, factor, number, streams = arguments
        line = _Line(builder, signature.args[2], number)
        value, product = line.scaled(at, factor)
        line.write(product, to, streams)
        return line.nonfinite(value)

    return types.int64(types.uint64, types.uint64, factor, types.int64, types.boolean), generate


@intrinsic
def weighted_line(
    typing: Context,
    to: types.Type,
    first_at: types.Type,
    first_weight: types.Type,
    second_at: types.Type,
    second_weight: types.Type,
    number: types.Type,
    streams: types.Type,
) -> Intrinsic:
    """Write line `number` of the weighted sum of two vectors; return as `scaled_line`, for the first.

    Products are rounded before they are added.
    """

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        to, first_at, first_weight, second_at, second_weight, number, streams = arguments
        line = _Line(builder, signature.args[2], number)
        value, first = line.scaled(first_at, first_weight)
        _, second = line.scaled(second_at, second_weight)
        line.write(builder.fadd(first, second), to, streams)
        return line.nonfinite(value)

    address, weight = types.uint64, first_weight
    signature = types.int64(address, address, weight, address, weight, types.int64, types.boolean)
    return signature, generate


class _Line:
    """The instructions on one line of vectors.

    Args:
        dtype: Numba's, of the vectors.
        number: of the line.
    """

    def __init__(self, builder: ir.IRBuilder, dtype: types.Float, number: ir.Value) -> None:
        self._builder = builder
        self._itemsize = dtype.bitwidth // 8
        kind = ir.DoubleType() if dtype == types.float64 else ir.FloatType()
        self._vector = ir.VectorType(kind, LINE_BYTES // self._itemsize)
        self._offset = builder.mul(number, _INDEX(LINE_BYTES))

    def scaled(self, at: ir.Value, factor: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the line of the vector at an address, and its product with a factor."""
        builder, count = self._builder, self._vector.count
        address = builder.add(at, self._offset)
        self._prefetch(builder.add(address, _INDEX(AHEAD_BYTES)))
        value = builder.load(_at(builder, address, self._vector), align=self._itemsize)
        one = builder.insert_element(ir.Constant(self._vector, ir.Undefined), factor, ir.IntType(32)(0))
        all_first = ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count)
        return value, builder.fmul(builder.shuffle_vector(one, one, all_first), value)

    def write(self, line: ir.Value, to: ir.Value, streams: ir.Value) -> None:
        """Store a line in the vector at an address."""
        builder = self._builder
        address = builder.add(to, self._offset)
        with builder.if_else(streams) as (then, otherwise):
            with then:
                _store(builder, line, address, streams=True, align=self._itemsize)
            with otherwise:
                _store(builder, line, address, streams=False, align=self._itemsize)

    def _prefetch(self, address: ir.Value) -> None:
        """Prefetch a line from any address; it never fails."""
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = self._builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        to_read, into_first_cache, data = number(0), number(3), number(1)
        self._builder.call(prefetch, [self._builder.inttoptr(address, byte), to_read, into_first_cache, data])

    def nonfinite(self, value: ir.Value) -> ir.Value:
        """Return a number with a bit for each element that is NaN or Inf."""
        builder = self._builder
        zero_or_nan = builder.fsub(value, value)
        found = builder.fcmp_unordered("uno", zero_or_nan, zero_or_nan)
        return builder.zext(builder.bitcast(found, ir.IntType(self._vector.count)), _INDEX)
