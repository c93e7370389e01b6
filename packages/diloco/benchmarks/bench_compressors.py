"""Compressing and adding a segment of 2**24 float32 values, against what memory does: a copy, and a sum in place.

    tools/bench -k compressors

A compressor reads 64 MiB and writes little; adding a message reads little, and reads and writes 64 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from hocket.testing.compressor import fill, make_segment
from hocket_diloco.chunk_topk import ChunkTopK
from hocket_diloco.dct import Dct
from hocket_diloco.quantise import Format, Per, Quantise

NUMEL = 1 << 24
COMPRESSORS = {
    "int8": Quantise(),
    "int8 by chunk": Quantise(per=Per.CHUNK),
    "int4": Quantise(format=Format.INT4),
    "e3m0": Quantise(format=Format.E3M0),
    "sign": Quantise(format=Format.SIGN),
    "int2, statistical": Quantise(format=Format.INT2, statistical=True),
    "int8, statistical": Quantise(format=Format.INT8, statistical=True),
    "chunk_topk": ChunkTopK(),
    "dct of 4096, chunk_topk": Dct(ChunkTopK(k=32)),
    "chunk_topk, int2": Quantise(ChunkTopK(), format=Format.INT2, statistical=True),
}


@cache
def segment() -> Any:
    made = make_segment([NUMEL])
    fill(made, 0)
    return made


@cache
def calls(name: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what compresses, and what adds."""
    own = segment()
    out = torch.zeros(NUMEL)
    if name == "memory":
        return lambda: out.copy_(own.outgoing), lambda: out.add_(own.outgoing)
    compressor = COMPRESSORS[name]
    state = compressor.init(own)
    message = compressor.compress(own, state, 0)
    return lambda: compressor.compress(own, state, 0), lambda: compressor.accumulate(message, 0.5, out)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["memory", *COMPRESSORS])
@pytest.mark.parametrize("what", ["compress", "add"])
def bench_compressors(benchmark: Any, what: str, name: str) -> None:
    benchmark.group = what
    call = calls(name)[what == "add"]
    benchmark.pedantic(call, rounds=9, warmup_rounds=1)
