"""The mechanisms that exist for speed alone: where each is, what replaces it, and the training it was built for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import replacements
from replacements import Alternative


class Where(Enum):
    """Where ranks are: processes of one host, one on each of several hosts with slow links, or threads."""

    HOST = "one host"
    HOSTS = "hosts at 100 Mbit/s"
    VIRTUAL = "virtual ranks"


@dataclass(frozen=True)
class Model:
    """Square linear layers without biases.

    Attributes:
        words: what the table calls it.
        pause_s: seconds of a step that stand for an accelerator's, in which the rank leaves its core to others.
    """

    words: str
    layers: int
    width: int
    batch: int = 4
    pause_s: float = 0.0


@dataclass(frozen=True)
class Case:
    """A training of which steps are measured.

    Attributes:
        recipe: a recipe and overrides.
    """

    recipe: tuple[str, ...]
    model: Model
    where: Where = Where.HOST

    @property
    def title(self) -> str:
        """What the table calls it."""
        place = "" if self.where is Where.HOST else f", {self.where.value}"
        return f"`{' '.join(self.recipe)}`, {self.model.words}{place}"


@dataclass(frozen=True)
class Mechanism:
    """Something that the same numbers would be had without.

    Attributes:
        file: where it is, below the folder of packages.
        without: puts the plain alternative in its place.
        exact: whether the alternative gives the same bits; else sums may be rounded in another order.
        apart: whether only a new process sees the alternative, so that jobs take turns.
    """

    name: str
    file: str
    without: Alternative
    cases: tuple[Case, ...]
    exact: bool = True
    apart: bool = False


#: Where memory is what takes time.
WIDE = Model("5 layers of 20 MB", 5, 2236)
LAYERS = Model("20 layers of 5 MB", 20, 1118)
#: Where the number of exchanges is.
SMALL = Model("54 layers of 64 KB", 54, 128)
#: Where the network is.
SLOW = Model("16 layers of 234 KB, 0.3 s of computing", 16, 242, pause_s=0.3)

_TOPK = "{name: error_feedback, compressor: {name: topk, density: 0.001}}"
_TRIMMED = "gradients.0.compressor={name: redsync.trimmed, density: 0.001}"
_SCHEDULED = ("sgd", "gradients.0.collective={name: allreduce, algorithm: recursive_doubling}")
_LAYERS_FORWARD = ("sgp", "parameters.0.segments=layers", "parameters.0.overlap=forward")

MECHANISMS = [
    Mechanism(
        "shared memory instead of messages",
        "core-runtime/src/hocket/transport/host/collectives.py",
        replacements.messages,
        (Case(("sgd",), WIDE), Case(("sgp",), WIDE)),
        exact=False,
    ),
    Mechanism(
        "sums where the contributions are",
        "core-runtime/src/hocket/collective/allreduce.py",
        replacements.second_buffer,
        (Case(("sgd",), WIDE),),
    ),
    Mechanism(
        "compiled mixing",
        "core-runtime/src/hocket/kernels/mixing.py",
        replacements.numpy_mixing,
        (Case(("dpsgd",), WIDE),),
    ),
    Mechanism(
        "all segments in one mixing",
        "core-runtime/src/hocket/collective/gossip.py",
        replacements.one_mix_each,
        (
            Case(("sgp", "parameters.0.segments=layers"), LAYERS),
            Case(("sgp", "parameters.0.segments=layers"), SMALL),
        ),
    ),
    Mechanism(
        "gradients copied in one compiled pass",
        "core-runtime/src/hocket/kernels/copying.py",
        replacements.torch_copy,
        (Case(("agd",), WIDE),),
    ),
    Mechanism(
        "stores around the caches",
        "core-runtime/src/hocket/kernels/lines.py",
        replacements.ordinary_stores,
        (Case(("agd",), WIDE), Case(("overlap_sgp",), WIDE)),
    ),
    Mechanism(
        "delayed merge in one compiled pass",
        "core-runtime/src/hocket/kernels/copying.py",
        replacements.torch_merge,
        (Case(("overlap_sgp",), WIDE),),
    ),
    Mechanism(
        "freed memory kept, in large pages",
        "core-runtime/src/hocket/launch/rank_process.py",
        replacements.glibcs_allocator,
        (Case(("sgd",), WIDE),),
        apart=True,
    ),
    Mechanism(
        "polls before sleeps",
        "core-runtime/src/hocket/transport/waiting.py",
        replacements.no_polls,
        (Case(("sgd", "gradients.0.segments=layers"), SMALL),),
    ),
    Mechanism(
        "futexes wake ranks of a host",
        "core-runtime/src/hocket/transport/host/sync.py",
        replacements.no_futex,
        (Case(("sgd",), WIDE),),
    ),
    Mechanism(
        "pipes wake whoever carries out schedules",
        "core-runtime/src/hocket/transport/host/wake.py",
        replacements.no_pipe,
        (Case((*_SCHEDULED, "gradients.0.segments=layers"), SMALL),),
    ),
    Mechanism(
        "looks at messages while computing",
        "core-runtime/src/hocket/progress/inline.py",
        replacements.no_looks,
        (Case(("agd",), SLOW, Where.HOSTS),),
    ),
    Mechanism(
        "no handshake below 256 KiB",
        "core-runtime/src/hocket/transport/mpi/__init__.py",
        replacements.open_mpis_eager_limit,
        (Case(_LAYERS_FORWARD, SLOW, Where.HOSTS),),
        apart=True,
    ),
    Mechanism(
        "NumPy's random state by its memory",
        "core-runtime/src/hocket/randomness.py",
        replacements.numpys_get_state,
        (Case(("sgd", "gradients.0.segments=layers"), SMALL, Where.VIRTUAL),),
    ),
    Mechanism(
        "a round's draws for all segments at once",
        "crossover/src/hocket_crossover/rounds.py",
        replacements.one_draw_each,
        (Case(("crossover", "parameters.0.overlap=none"), SMALL),),
    ),
    Mechanism(
        "top-k's threshold by a partition",
        "core-runtime/src/hocket/compressor/topk.py",
        replacements.torch_topk,
        (Case(("sgd", f"gradients.0={{collective: sparse_allreduce, compressor: {_TOPK}}}"), WIDE),),
    ),
    Mechanism(
        "candidates from the last step's floor",
        "redsync/src/hocket_redsync/selection.py",
        replacements.exact_selection,
        (Case(("redsync", _TRIMMED), WIDE),),
    ),
    Mechanism(
        "residuals updated and searched in one compiled pass",
        "redsync/src/hocket_redsync/kernels/loops.py",
        replacements.separate_passes,
        (Case(("redsync", _TRIMMED), WIDE),),
    ),
]
