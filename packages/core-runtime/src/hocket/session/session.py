"""A session: a strategy attached to a model and an optimizer, on one rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import HocketError, NonFiniteError
from hocket.plugin import default_registry
from hocket.segment.storage import ParameterStorage
from hocket.session.batches import SessionData
from hocket.session.consensus import Consensus, distance_from_mean
from hocket.session.exchanging import Counters
from hocket.session.forward_merge import ForwardMerge
from hocket.session.opening import Opening
from hocket.session.weights import BatchWeights
from hocket.strategy.exchange import Overlap
from hocket.strategy.strategy import Strategy
from hocket.transport.peer import Peer

__all__ = ["Session"]

_log = logging.getLogger("hocket")


class Session:
    """What `hocket.attach` returns; use it as a context manager.

    Attributes:
        rank, size: this rank, and how many there are.
        step: how many steps have ended; those without an optimizer step (GradScaler found Inf) count.
        skipped_steps: steps left out because a gradient was NaN or Inf, with `on_nonfinite="skip"`.
        replicas_equal: whether all replicas hold the same bits after every step.
        counters: bytes sent and seconds waited so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        peer: Peer,
        storage: ParameterStorage,
        on_nonfinite: str,
        replicas_equal: bool,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.peer = peer
        self.rank, self.size = peer.rank, peer.size
        self.step = 0
        self.skipped_steps = 0
        self.counters = Counters()
        self.control = peer.lane("session")
        self._storage = storage
        self._on_nonfinite = on_nonfinite
        self.replicas_equal = replicas_equal
        self._weights = BatchWeights(storage.parameters.values())
        opening = Opening(peer, storage, self.counters)
        self._gradients = opening.gradients(strategy, self._weights)
        self._weights.gradients_stay_local = self._gradients is None
        self._parameters = opening.parameters(strategy)
        self._opened = opening.opened
        self._forward_merges = [
            ForwardMerge(model, exchange)
            for exchange in self._parameters.exchanges
            if exchange.overlap is Overlap.FORWARD
        ]
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        self._observers = default_registry().hook
        self._stepped_in_batch = False
        self._warned_of_skipped_batch = False
        self._closed = False

    @property
    def weight(self) -> float:
        """How much this rank's current batch counts in means; 0 for a repetition, where it is out of data."""
        return self._weights.current

    # ---- the loop ----------------------------------------------------------------------------------------------

    def data(self, loader: Iterable[Any], weight: Callable[[Any], float] | None = None) -> SessionData:
        """Iterate over `loader`, as often on every rank as on the one with most batches.

        Args:
            loader: this rank's batches.
            weight: how much a batch counts in means over ranks, relative to 1: `lambda b: len(b[0]) / 32` weighs
                by samples. Without it every batch counts the same, as in DistributedDataParallel.
        """
        return SessionData(self, loader, weight)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Mark backwards after which nothing is sent: their gradients add up until one outside of it."""
        if self._gradients is not None:
            self._gradients.accumulating = True
        self._weights.accumulated = True
        try:
            yield
        finally:
            if self._gradients is not None:
                self._gradients.accumulating = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of the gradients that the optimizer will get, over the whole model; return the norm.

        Use it instead of torch's function: it stays right where ranks hold the gradients of parts of the model.
        """
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def begin_batch(self, weight: float) -> None:
        """Take note of a batch; `data` calls it."""
        self._weights.begin_batch(weight)
        self._stepped_in_batch = False
        if self._gradients is not None:
            self._gradients.exchanged_in_step = 0

    def end_batch(self) -> None:
        """End a step whose batch was skipped, or whose optimizer did not step; `data` calls it."""
        if self._stepped_in_batch or self._weights.accumulated:
            return
        if self._gradients is not None and not self._gradients.exchanged_in_step:
            if not self._warned_of_skipped_batch:
                self._warned_of_skipped_batch = True
                _log.warning(
                    "rank %d skipped the batch of step %d: it steps with the other ranks' gradients",
                    self.rank,
                    self.step,
                )
            self._gradients.take_part()
            self.optimizer.step()
        else:
            self._end_step()

    def _before_step(self) -> None:
        self._storage.check()
        if self._gradients is None:
            self._weights.drop_repetition()
            return
        if not self._gradients.nonfinite_anywhere or getattr(self.optimizer, "found_inf", None) is not None:
            return
        if self._on_nonfinite == "skip":
            self.skipped_steps += 1
            self._drop_gradients()
        elif self._gradients.nonfinite:
            raise NonFiniteError(
                f"the gradients of rank {self.rank} at step {self.step} hold NaN or Inf, in "
                f"{_some(self._gradients.nonfinite)}. on_nonfinite='skip' leaves such steps out on all ranks"
            )
        else:
            raise NonFiniteError(
                f"another rank than {self.rank} contributed NaN or Inf to the gradients of step {self.step}"
            )

    def _drop_gradients(self) -> None:
        # An optimizer leaves parameters without gradient alone: no decay, no momentum, no moments.
        for parameter in self._storage.parameters.values():
            parameter.grad = None

    def _after_step(self) -> None:
        self._stepped_in_batch = True
        self._weights.end_step()
        self._end_step()

    def _end_step(self) -> None:
        self.step += 1
        self._parameters.after_step(self.step)
        self.peer.report_progress(self.step)
        self._observers.hocket_step_end(session=self, step=self.step - 1)

    # ---- replicas ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish everything that is under way, so that parameters hold what they will hold in the next forward."""
        self._parameters.settle()
        for opened in self._opened:
            opened.channel.flush()

    def consensus(self) -> Consensus:
        """Set the parameters and floating-point buffers of every rank to the replicas' mean; collective.

        Used in a `with` statement, each rank gets its own replica back at the end, to train on:

            with session.consensus():
                evaluate(model)
        """
        self.settle()
        return Consensus(self)

    def consensus_distance(self) -> float:
        """Return the root mean square over ranks of the replicas' Euclidean distance from their mean; collective."""
        self.settle()
        return distance_from_mean(self)

    @property
    def flats(self) -> list[Tensor]:
        """The flat buffers that the trainable parameters are views of."""
        return self._storage.flats

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON-able), by rank; collective."""
        return [json.loads(data) for data in self.peer.allgather_bytes(json.dumps(value).encode())]

    # ---- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is under way and take the hooks off; collective. The model stays usable."""
        if self._closed:
            return
        self._closed = True
        self.settle()
        for opened in self._opened:
            opened.channel.close()
        self.control.close()
        self._unhook()

    def _unhook(self) -> None:
        self._weights.close()
        for handle in self._handles:
            handle.remove()
        for merge in self._forward_merges:
            merge.close()
        if self._gradients is not None:
            self._gradients.close()

    def __enter__(self) -> Session:
        if self._closed:
            raise HocketError("this session is closed: attach again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # The other ranks may not be here: closing together would wait for them.
            self._unhook()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
