"""A session: a strategy attached to a model and an optimizer, on one rank."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import CheckpointError, HocketError, NonFiniteError, some
from hocket.observation import Observer
from hocket.plugin import default_registry
from hocket.segment.storage import ParameterStorage
from hocket.session.batches import SessionData
from hocket.session.checkpointing import Resumed, load_session, save_session
from hocket.session.consensus import Consensus, average_optimizers, distance_from_mean
from hocket.session.exchanging import Counters
from hocket.session.opening import Opening
from hocket.session.passes import Passes
from hocket.session.phase import OpenPhase
from hocket.session.phasing import LateGradients, send_residuals
from hocket.session.ranks import Ranks
from hocket.session.streaming import StreamedSamples
from hocket.session.weights import BatchWeights
from hocket.strategy.strategy import Strategy

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
        passes: over `data`: how many have ended, and the one under way.
        phase: the exchanges that are open.
        late: gradients that earlier phases have left for the next step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        ranks: Ranks,
        storage: ParameterStorage,
        on_nonfinite: str,
        initial_equal: bool,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.peer = ranks.peer
        self.rank, self.size = ranks.peer.rank, ranks.peer.size
        self.step = 0
        self.skipped_steps = 0
        self.counters = Counters()
        self.passes = Passes()
        self.control = ranks.peer.lane("session")
        self._streamed: StreamedSamples | None = None
        self._ranks = ranks
        self._storage = storage
        self._on_nonfinite = on_nonfinite
        self._weights = BatchWeights(storage.parameters.values())
        self._observer = observer
        #: Whether the replicas hold the same bits now, if exchanges keep them so.
        self._initial_equal = initial_equal
        self.late = LateGradients(storage.parameters)
        self.phase = self._open(strategy.at(0))
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        self._observers = default_registry().hook
        self._stepped_in_batch = False
        self._warned_of_skipped_batch = False
        self._closed = False

    def _open(self, strategy: Strategy) -> OpenPhase:
        """Open the exchanges of a phase; collective."""
        opening = Opening(self._ranks, self._storage, strategy, self.counters, self._observer)
        self.replicas_equal = self._initial_equal and strategy.keeps_replicas_equal(self._ranks.placement)
        return OpenPhase(strategy, opening, self.model, self.optimizer, self._weights, self._before_backward)

    def _change_phase(self, strategy: Strategy) -> None:
        """Go on with another strategy; collective, between steps."""
        self.settle()
        takeover = self.phase.takeover
        send_residuals(self.phase.opened, self._storage.parameters, self.late, takeover)
        if takeover is not None:
            takeover.hand_back()
        if strategy.keeps_replicas_equal(self._ranks.placement):
            if not self.replicas_equal:
                Consensus(self)
                # Equal gradients keep replicas equal only if the optimizers do the same with them.
                average_optimizers(self.optimizer, self.control, self.gather)
            self._initial_equal = True
        self.phase.close()
        self.phase = self._open(strategy)

    def enter_phase_of(self, step: int) -> None:
        """Open the exchanges that hold when `step` steps have ended, to load what they kept; collective."""
        strategy = self.strategy.at(step)
        if strategy != self.phase.strategy:
            self.settle()
            self.phase.close()
            self.phase = self._open(strategy)

    def begin_equal(self) -> None:
        """Take note that all replicas hold the same bits now."""
        self._initial_equal = True
        self.replicas_equal = self.phase.strategy.keeps_replicas_equal(self._ranks.placement)

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

        With an exchange of samples batches travel from rank to rank, and the loader is the same one in every epoch; the
        first call is collective then.

        Raises:
            HocketError: samples travel, and this is another loader than the first.
        """
        exchange = self.strategy.samples
        if exchange is None:
            return SessionData(self, loader, weight)
        if self._streamed is None:
            self._streamed = StreamedSamples(exchange, loader, self.peer)
        elif loader is not self._streamed.loader:
            raise HocketError(
                "session.data was given another loader than before, and with samples in the strategy the first one's "
                "batches travel from epoch to epoch: make one loader before the loop over epochs"
            )
        return SessionData(self, self._streamed, weight)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Mark backwards after which nothing is sent: their gradients add up until one outside of it."""
        if self.phase.gradients is not None:
            self.phase.gradients.accumulating = True
        self._weights.accumulated = True
        try:
            yield
        finally:
            if self.phase.gradients is not None:
                self.phase.gradients.accumulating = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of the gradients that the optimizer will get, over the whole model; return the norm.

        Use it instead of torch's function: it stays right where ranks hold the gradients of parts of the model.
        """
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def begin_batch(self, weight: float) -> None:
        """Take note of a batch; `data` calls it."""
        self._note_phase("forward" if self.phase.gradients is not None else "forward and backward")
        self._weights.begin_batch(weight)
        self._stepped_in_batch = False
        if self.phase.gradients is not None:
            self.phase.gradients.exchanged_in_step = 0

    def end_batch(self) -> None:
        """End a step whose batch was skipped, or whose optimizer did not step; `data` calls it."""
        if self._stepped_in_batch or self._weights.accumulated:
            return
        if self.phase.gradients is not None and not self.phase.gradients.exchanged_in_step:
            if not self._warned_of_skipped_batch:
                self._warned_of_skipped_batch = True
                _log.warning(
                    "rank %d skipped the batch of step %d: it steps with the other ranks' gradients",
                    self.rank,
                    self.step,
                )
            self.phase.gradients.take_part()
            self.optimizer.step()
        else:
            self._end_step()

    def _note_phase(self, name: str) -> None:
        if self._observer is not None:
            self._observer.phase(name, self.peer.now())

    def _before_backward(self) -> None:
        self._note_phase("backward")
        self._storage.check()

    def _before_step(self) -> None:
        self._note_phase("optimizer")
        self._storage.check()
        self.phase.parameters.before_step()
        if self.phase.takeover is not None:
            self.phase.takeover.suspend()
        if self.phase.gradients is None:
            self._weights.drop_repetition()
            self.late.join()
            if (
                self._on_nonfinite == "skip"
                and self.phase.strategy.gradients
                and not self._gradients_are_finite()
            ):
                # A single rank, which exchanges nothing, skips what several would.
                self.skipped_steps += 1
                self._drop_gradients()
            return
        self.late.join()
        if (
            not self.phase.gradients.nonfinite_anywhere
            or getattr(self.optimizer, "found_inf", None) is not None
        ):
            return
        if self._on_nonfinite == "skip":
            self.skipped_steps += 1
            self._drop_gradients()
        elif self.phase.gradients.nonfinite:
            raise NonFiniteError(
                f"the gradients of rank {self.rank} at step {self.step} hold NaN or Inf, in "
                f"{some(self.phase.gradients.nonfinite)}. on_nonfinite='skip' leaves such steps out on all ranks"
            )
        else:
            raise NonFiniteError(
                f"another rank than {self.rank} contributed NaN or Inf to the gradients of step {self.step}"
            )

    def _gradients_are_finite(self) -> bool:
        gradients = [p.grad for p in self._storage.parameters.values() if p.grad is not None]
        return all(bool(torch.isfinite(gradient.sum())) for gradient in gradients)

    def _drop_gradients(self) -> None:
        # An optimizer leaves parameters without gradient alone: no decay, no momentum, no moments.
        for parameter in self._storage.parameters.values():
            parameter.grad = None

    def _after_step(self) -> None:
        self._stepped_in_batch = True
        if self.phase.takeover is not None:
            self.phase.takeover.resume()
        self._weights.end_step()
        self._end_step()

    def _end_step(self) -> None:
        if self.phase.parameters.exchanges:
            self._note_phase("parameters")
        self.step += 1
        self.phase.parameters.after_step(self.step)
        if self._observer is not None:
            self._observer.step_ended(self.step - 1, self.peer.now())
        self.peer.report_progress(self.step)
        if self.strategy.phases and (following := self.strategy.at(self.step)) != self.phase.strategy:
            self._change_phase(following)
        self._observers.hocket_step_end(session=self, step=self.step - 1)

    # ---- replicas ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish everything that is under way, so that parameters hold what they will hold in the next forward."""
        self.phase.settle()

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

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None, **more: Any) -> Path:
        """Save all that training goes on from into a new directory of `folder`; collective, after a step.

        Training goes on as if nothing had been saved. A kill at any time leaves the checkpoints that were complete.

        Args:
            folder: on a disk that all ranks share; made if it is not there.
            keep: how many complete checkpoints are left in it, the newest; all where None.
            more: what else has `state_dict` and `load_state_dict`, by name: schedulers, a scaler, an EMA model.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on all ranks: something cannot be saved, the folder cannot be written or holds
                checkpoints of later steps, or gradients are being accumulated.
        """
        return save_session(self, Path(folder), keep, more)

    def load(self, folder: str | os.PathLike[str], **more: Any) -> Resumed:
        """Continue from the newest complete checkpoint in `folder`; collective, right after `attach`.

        With as many ranks as have saved, each continues where it was, bit for bit where the strategy is
        deterministic: the first pass over `session.data` leaves out the batches that were handed out already.
        Another number of ranks continues from the replicas' mean, and a warning says what is lost.

        Args:
            folder: what `save` was given, or one checkpoint's directory.
            more: the same names as were given to `save`; each object's `load_state_dict` is called.

        Raises:
            CheckpointError: on all ranks: no complete checkpoint, a damaged one, or one of another strategy, model
                or optimizer; names file, key, what was expected and what was found. A model that is refused is
                left as it was.
        """
        return load_session(self, Path(folder), more)

    def end_step_to_save(self) -> None:
        """End a step whose optimizer did not step (GradScaler found Inf), as the next batch would; `save` calls it."""
        if self._weights.accumulated:
            raise CheckpointError(
                f"rank {self.rank}: save after optimizer.step(), not within an accumulation: the gradients that were "
                "accumulated so far are no part of a checkpoint"
            )
        if self.passes.under_way and not self._stepped_in_batch:
            self.end_batch()
            self._stepped_in_batch = True

    # ---- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is under way and take the hooks off; collective. The model stays usable."""
        if self._closed:
            return
        self._closed = True
        self.settle()
        if self.phase.takeover is not None:
            self.phase.takeover.hand_back()
        self.phase.close()
        if self._streamed is not None:
            self._streamed.close()
        self.control.close()
        self._unhook()
        if self._observer is not None:
            self._observer.close()

    def _unhook(self) -> None:
        self._weights.close()
        for handle in self._handles:
            handle.remove()
        self.phase.unhook()

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
            if self._observer is not None:
                self._observer.abandon()
