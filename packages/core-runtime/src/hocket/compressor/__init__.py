"""The form in which values travel: the interface of compressors and core's own.

`hocket.compressor.ddp` hands a compressor to `DistributedDataParallel`.
"""

from hocket.compressor.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    SparseValues,
    State,
)
from hocket.compressor.cast import BFloat16, Float16
from hocket.compressor.error_feedback import ErrorFeedback
from hocket.compressor.local_clipping import LocalClipping
from hocket.compressor.momentum_correction import MomentumCorrection
from hocket.compressor.optimizer_terms import OptimizerTerms, optimizer_terms
from hocket.compressor.shared_random import SharedRandom
from hocket.compressor.topk import (
    TopK,
    add_sparse,
    clear_sparse,
    largest,
    pack_sparse,
    sparse_bytes,
    unpack_sparse,
)
from hocket.compressor.wrapper import Identity, Wrapper, WrapperState

__all__ = [
    "BFloat16",
    "Compressor",
    "CompressorTraits",
    "ErrorFeedback",
    "Float16",
    "Footprint",
    "Identity",
    "LocalClipping",
    "Message",
    "MomentumCorrection",
    "OptimizerTerms",
    "SharedRandom",
    "SparseValues",
    "State",
    "TopK",
    "Wrapper",
    "WrapperState",
    "add_sparse",
    "clear_sparse",
    "largest",
    "optimizer_terms",
    "pack_sparse",
    "sparse_bytes",
    "unpack_sparse",
]
