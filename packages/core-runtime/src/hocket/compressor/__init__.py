"""In what form values travel: the interface of compressors and core's own.

`hocket.compressor.ddp` hands a compressor to `DistributedDataParallel`.
"""

from hocket.compressor.api import Compressor, Message, SegmentShape, State
from hocket.compressor.cast import BFloat16, Float16
from hocket.compressor.error_feedback import ErrorFeedback
from hocket.compressor.local_clipping import LocalClipping
from hocket.compressor.momentum_correction import MomentumCorrection
from hocket.compressor.none import NoCompression
from hocket.compressor.optimizer_terms import OptimizerTerms, optimizer_terms
from hocket.compressor.shared_random import SharedRandom
from hocket.compressor.sparse import (
    SparseValues,
    add_sparse,
    check_indexable,
    clear_sparse,
    pack_sparse,
    sparse_bytes,
    unpack_sparse,
)
from hocket.compressor.topk import TopK, largest
from hocket.compressor.wrapper import Wrapper, WrapperState

__all__ = [
    "BFloat16",
    "Compressor",
    "ErrorFeedback",
    "Float16",
    "LocalClipping",
    "Message",
    "MomentumCorrection",
    "NoCompression",
    "OptimizerTerms",
    "SegmentShape",
    "SharedRandom",
    "SparseValues",
    "State",
    "TopK",
    "Wrapper",
    "WrapperState",
    "add_sparse",
    "check_indexable",
    "clear_sparse",
    "largest",
    "optimizer_terms",
    "pack_sparse",
    "sparse_bytes",
    "unpack_sparse",
]
