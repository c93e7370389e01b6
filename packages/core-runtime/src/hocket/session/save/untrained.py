"""The tensors of a model beside its trained parameters: frozen ones and buffers, of which not all have a mean."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.checkpoint.subclasses import is_composite, plain_tensors
from hocket.errors import some
from hocket.plan.buffers import averaged_buffers
from hocket.segment.shards import local
from hocket.session.exchange.checksums import Comparison, compare
from hocket.session.ranks import broadcast_tensors
from hocket.session.save.set_to_mean import set_to_mean
from hocket.session.statistics import synchronises
from hocket.session.step.weights import BatchWeights
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer, gather

_log = logging.getLogger("hocket")

#: What BatchNorm counts, which says nothing to anybody who reads of buffers that differ.
_UNTOLD = "num_batches_tracked"


@dataclass(frozen=True)
class Places:
    """The ranks that hold the same tensors: of parameters, and of buffers, which each rank holds whole.

    Attributes:
        peer, lane: among the ranks that hold the same part of each parameter.
        everyone, control: among all ranks; the same two for whole models.
    """

    peer: Peer
    lane: Lane
    everyone: Peer
    control: Lane

    def compare(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Comparison:
        """Compare tensors over the ranks that hold them; collective."""
        if self.peer is self.everyone:
            return compare(self.peer, {**parameters, **buffers})
        return compare(self.peer, parameters) | compare(self.everyone, buffers)


@dataclass(frozen=True)
class Differing:
    """The tensors beside the trained parameters that differ between ranks.

    Attributes:
        places: the ranks that hold them.
        parameters: frozen ones, which get their plain mean.
        statistics: buffers that get their mean by samples.
        others: by lane, tensors that become its first rank's.
        share: the weight of this rank's statistics in the mean.
    """

    places: Places
    parameters: Sequence[Tensor]
    statistics: Sequence[Tensor]
    others: Sequence[tuple[Lane, Tensor]]
    share: float

    @property
    def tensors(self) -> list[Tensor]:
        """Return all of these tensors, as this rank has them."""
        return [*self.parameters, *self.statistics, *(tensor for _, tensor in self.others)]

    def make_one(self) -> None:
        """Make the tensors equal on all ranks that hold them; collective."""
        for tensor in self.parameters:
            set_to_mean(tensor, self.places.lane)
        for tensor in self.statistics:
            set_to_mean(tensor, self.places.control, self.share)
        for lane, tensor in self.others:
            broadcast_tensors(plain_tensors(tensor), lane, 0)


class UntrainedTensors:
    """A model's frozen parameters and buffers, on all ranks.

    Only a statistic has a mean: that of the unit vectors of a spectral norm is no unit vector, and a queue's or a
    mask's is none at all.

    Args:
        model: the model; its tensors are looked up each time, as a module may replace them.
        trained: names of its trained parameters.
        named: buffers that the user calls statistics, as `averaged_buffers` takes them.
        places: the ranks that hold them.
        weights: of this rank's batches; their sum is the weight of its statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[str],
        named: Sequence[str],
        places: Places,
        weights: BatchWeights,
    ) -> None:
        self._model, self._trained, self._named = model, frozenset(trained), tuple(named)
        self._places, self.weights = places, weights
        self._peer = places.everyone
        self.num_ranks = places.everyone.size
        self._warned_of: set[str] = set()
        # How many batches each statistic was of when all ranks held the same.
        self._equal_after: dict[str, Tensor] = {}

    def statistics(self) -> dict[str, Tensor]:
        """Return the buffers that have a mean, by name."""
        return averaged_buffers(self._model, self._named)

    def note_equal(self, names: Sequence[str] | None = None) -> None:
        """Note that all ranks hold the same statistics, or only those with the given names."""
        counts = self._counts()
        self._equal_after = {n: counts[n].clone() for n in counts if names is None or n in names}

    def equal_statistics(self) -> dict[str, Tensor]:
        """Return by name the statistics that should be equal.

        They were so once, and are unchanged since, or of modules that see the batches of all ranks.
        """
        noted = self._equal_after
        equal = {n for n, count in self._counts().items() if n in noted and torch.equal(noted[n], count)}
        modules = dict(self._model.named_modules())
        equal |= {n for n in noted if synchronises(modules.get(n.rpartition(".")[0]), self.num_ranks)}
        return {name: tensor for name, tensor in self.statistics().items() if name in equal}

    def _counts(self) -> dict[str, Tensor]:
        """Return the number of batches in each statistic, by name, where a module counts them."""
        buffers = dict(self._model.named_buffers())
        counters = {name: f"{name.rpartition('.')[0]}.{_UNTOLD}".lstrip(".") for name in self.statistics()}
        return {name: buffers[counter] for name, counter in counters.items() if counter in buffers}

    def differing(self, *, others: bool) -> Differing:
        """Find the tensors that differ between ranks; collective.

        Args:
            others: whether to include buffers without a mean, which are logged once by name.
        """
        named = self._model.named_parameters()
        frozen = {name: local(p) for name, p in named if name not in self._trained}
        statistics = self.statistics()
        buffers = dict(self._model.named_buffers()) if others else statistics
        found = {**frozen, **buffers}
        compared = self._places.compare(frozen, buffers)
        names, alike = sorted(compared.differing), sorted(compared.alike)
        means = [n for n in alike if found[n].is_floating_point() and not is_composite(found[n])]
        parameters = [name for name in means if name in frozen]
        averaged = [name for name in means if name in statistics]
        rest = [name for name in alike if name not in parameters and name not in averaged]
        if others:
            self._tell_rank0s([name for name in rest if not name.endswith(_UNTOLD)])
            self.warn_unlike([name for name in names if name not in alike])
        samples = gather(self._peer, self.weights.total) if averaged else [0.0]
        share = samples[self._peer.rank] * len(samples) / sum(samples) if sum(samples) else 1.0
        lanes = [self._places.lane if name in frozen else self._places.control for name in rest]
        kinds = [[found[name].data for name in kind] for kind in (parameters, averaged, rest)]
        firsts = list(zip(lanes, kinds[2], strict=True))
        return Differing(self._places, kinds[0], kinds[1], firsts, share)

    def _tell_rank0s(self, names: Sequence[str]) -> None:
        self._tell(
            names,
            "these tensors differ between ranks and are not known running statistics, so a consensus gives all ranks "
            "those of rank 0: %s. To average them, name them: hocket.attach(..., statistics=[names])",
        )

    def warn_unlike(self, names: Sequence[str]) -> None:
        """Warn once of each buffer that has several shapes, so that each rank keeps its own."""
        self._tell(
            names,
            "tensors of the model differ in shape or dtype between ranks, so each rank keeps its own: %s. Build the "
            "same model on all ranks",
        )

    def _tell(self, names: Sequence[str], what: str) -> None:
        new = [name for name in names if name not in self._warned_of]
        self._warned_of.update(new)
        if new and self._peer.rank == 0:
            _log.warning(what, some(new))
