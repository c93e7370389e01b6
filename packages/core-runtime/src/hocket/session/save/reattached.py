"""The counts of models that are attached again: their next session continues from them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hocket.session.exchange.checksums import checksum
from hocket.transport.peer import Peer, gather

_log = logging.getLogger("hocket")

#: Steps and passes over `session.data` that have ended, and checksums of parameters that each rank trained alone.
Counted = tuple[int, int, Mapping[str, int]]

_counted: WeakKeyDictionary[nn.Module, Counted] = WeakKeyDictionary()


def counted_before(model: nn.Module, peer: Peer, initial: str) -> tuple[int, int]:
    """Return the counts of the model's earlier sessions; collective.

    Args:
        model: this rank's.
        peer: all ranks.
        initial: `rank0` where all ranks are about to take rank 0's values: what others have trained alone is then lost,
            with a warning.
    """
    steps, passes, alone = _counted.get(model, (0, 0, {}))
    now = dict(model.named_parameters()) if alone else {}
    unchanged = {name: its for name, its in alone.items() if name in now and checksum(now[name]) == its}
    gathered = gather(peer, [steps, passes, unchanged])
    if peer.rank == 0 and initial == "rank0" and any(of_rank[2] != unchanged for of_rank in gathered):
        _log.warning(
            "the ranks' replicas differed when this model's last session was closed, and all ranks go on from rank "
            "0's: call session.consensus() before close() to go on from their mean, or attach(..., initial='keep')"
        )
    return gathered[0][0], gathered[0][1]


def note_counted(
    model: nn.Module, steps: int, passes: int, alone: Mapping[str, Tensor] | None = None
) -> None:
    """Save the counts of a model's session, for as long as the model exists.

    Args:
        model: the model.
        steps, passes: the counts.
        alone: by name, trained parameters of which each rank may hold other values; None for none.
    """
    _counted[model] = steps, passes, {name: checksum(tensor) for name, tensor in (alone or {}).items()}
