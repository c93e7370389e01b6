"""The check that replicas are equal where a strategy keeps them so: by checksums, at collective calls and periodically.

A strategy says that replicas stay equal, but a rank's own changes to its weights (a row that its batch rescales, a file
that it alone loads) are not sent. Checksums are of bits, in order, read in place.

Between such calls ranks exchange checksums every `ROUNDS` rounds of gradients, after a step. They read the result when
the next round begins, which needs all ranks, so that it is there by then, and act on it after that round's step. A
temporary difference within a step (a rank's own perturbation, SAM's) does not count.
"""

from __future__ import annotations

import logging

import numpy as np
from torch import Tensor, nn

from hocket.arrays import Array
from hocket.errors import DisagreementError
from hocket.segment.shards import local
from hocket.session.exchange.checksums import checksum, compare
from hocket.session.exchange.phases import Phases
from hocket.session.ranks import differing
from hocket.session.replica import Replica
from hocket.session.save.consensus import average, average_optimizers, squared_distance
from hocket.transport.peer import gather
from hocket.transport.request import Request
from hocket.transport.status import number_ranks

_log = logging.getLogger("hocket")

#: After so many rounds of gradients ranks compare their replicas: one read of them, where each round reads them often.
ROUNDS = 100


class EqualReplicas:
    """The check of replicas that the strategy keeps equal: all parameters, frozen ones too, and some statistics.

    Statistics of the ranks' own batches differ. Equal are those that have seen no batch since all ranks held the same:
    BatchNorm in eval mode since the session was attached, or any that the strategy has just averaged. Where replicas
    differ, frozen parameters may, too: a teacher within the model follows its own student.

    Args:
        replica: this rank's.
        phases: know whether the strategy keeps replicas equal.
        strategy: its name, for messages.
        averages: whether replicas that differ are set to their mean, with a warning; else that is an error.
    """

    def __init__(self, replica: Replica, phases: Phases, strategy: str, *, averages: bool) -> None:
        self._replica, self._phases = replica, phases
        self._strategy, self._averages = strategy, averages
        self._peer = replica.ranks.peer
        self._rounds, self._next = 0, ROUNDS
        self._asked: Request[list[Array]] | None = None
        self._own = np.empty(0, np.uint8)  # held as long as it is sent
        self._found = False
        self._times_found = 0

    def between_steps(self, step: int) -> None:
        """Start a comparison where one is due, and handle replicas that were found to differ."""
        if self._found:
            self.look("training", step, repairs=True)
        elif self._rounds >= self._next:
            self._replica.storage.take_values()
            self._ask()

    def begin_round(self, step: int) -> None:
        """Note a round of gradients that all ranks begin, and read the checksums of the last comparison."""
        if self._found:  # and this rank has not stepped since
            self.look("training", step, repairs=True)
        if self._rounds >= self._next:
            self._ask()
            self._read_comparison()
        self._rounds += 1

    def look(self, call: str, step: int, *, repairs: bool) -> list[Tensor]:
        """Compare the replicas; collective, with no exchange under way.

        Args:
            call: the call that compares them.
            step: number of steps that have ended.
            repairs: whether replicas that differ are set to their mean here, where they are no error.

        Returns:
            The tensors that still differ: flat buffers of parameters, frozen parameters, and statistics.

        Raises:
            DisagreementError: they differ, and differences are errors.
        """
        if self._rounds >= self._next:
            self._ask()
            self._read_comparison()
        self._found = False
        if self._peer.size == 1 or not self._phases.replicas_equal:
            return []
        beside = self._frozen() | self._replica.untrained.equal_statistics()
        tensors = {f"flat {n}": flat for n, flat in enumerate(self._replica.storage.flats)} | beside
        apart = [tensors[name] for name in compare(self._peer, tensors, call).alike]
        if not apart:
            return []
        numbers = [tensor for tensor in apart if tensor.is_floating_point()]
        squares = gather(self._peer, squared_distance(numbers, self._replica.lane))
        distance = float(sum(squares) / len(squares)) ** 0.5
        if numbers == apart and distance == 0.0:  # zeros of either sign
            return []
        self._report(call, step, distance, beside)
        if repairs:
            average(numbers, self._replica.lane)
            # Else they would part again.
            average_optimizers(
                self._replica.optimizers, self._replica.lane, lambda value: gather(self._peer, value)
            )
            return []
        return numbers

    def _ask(self) -> None:
        phases = self._phases
        exchanges = phases.active.strategy.gradients
        waits = all(exchange.collective.traits.divides_by_weight for exchange in exchanges)
        if not (phases.replicas_equal and phases.active.gradients and waits and self._peer.size > 1):
            self._next = self._rounds + ROUNDS
        elif self._asked is None:
            sums = [checksum(flat) for flat in self._replica.storage.flats]
            self._own = np.array(sums, np.uint32).view(np.uint8)
            room = np.empty((self._peer.size, self._own.size), np.uint8)
            self._asked = self._replica.lane.iallgather(self._own, room)

    def _read_comparison(self) -> None:
        if self._asked is not None:
            gathered = self._asked.wait()
            self._asked, self._next = None, self._rounds + ROUNDS
            self._found = any(bytes(of_rank) != bytes(gathered[0]) for of_rank in gathered)

    def _frozen(self) -> dict[str, Tensor]:
        """Return the parameters that were frozen when the session was attached, by name."""
        trained = self._replica.storage.parameters
        named = self._replica.model.named_parameters()
        return {name: local(p.detach()) for name, p in named if name not in trained}

    def _report(self, call: str, step: int, distance: float, beside: dict[str, Tensor]) -> None:
        """Report the difference, its size and its likely causes."""
        values = {name: p.detach() for name, p in self._replica.storage.parameters.items()} | beside
        compared = compare(self._peer, values)
        names, others = compared.alike, compared.others[compared.alike[0]]
        kinds = "parameters" + " and statistics" * (len(beside) > len(self._frozen()))
        island = self._replica.ranks.island
        who = "islands" if island.members else "ranks"
        [first], others = island.in_session([0]), island.in_session(others)
        text = (
            f"after step {step} ({call}) the {who}' replicas differ, although {self._strategy} keeps them equal: rank "
            f"{first}'s values differ from those of {number_ranks(others)} in {len(names)} of {len(values)} {kinds} "
            f"(the first is {names[0]!r}); root mean square distance from the mean: {distance:.3g}"
        )
        causes = self._causes()
        if not self._averages:
            raise DisagreementError(f"{text}. {causes}")
        self._times_found += 1
        if self._peer.rank == 0 and self._times_found == 1:
            _log.warning(
                "%s. Training goes on: Hocket sets the replicas to their mean at every consensus, save and close, and "
                "every %d exchanges of gradients. To stop the job instead, pass on_difference='error' to "
                "hocket.attach. %s",
                text,
                ROUNDS,
                causes,
            )
        elif self._peer.rank == 0 and self._times_found & (self._times_found - 1) == 0:
            _log.warning("%s. This has happened %d times", text, self._times_found)

    def _causes(self) -> str:
        """Return the likely causes, the surest first; collective."""
        kinds = differing(
            self._peer,
            {"optimizer's state": _kinds(self._replica)},
            numbers=self._replica.ranks.island.members or None,
        )
        embeddings = nn.Embedding, nn.EmbeddingBag
        scaling = [
            name or "the model"
            for name, module in self._replica.model.named_modules()
            if isinstance(module, embeddings) and module.max_norm is not None
        ]
        known = []
        if scaling:
            known.append(
                f"module {scaling[0]} has max_norm, by which each rank rescales the rows of its own batch"
            )
        if kinds:
            known.append(f"optimizers hold different state:\n{kinds}\n")
        known.append(
            "weights loaded or written on some ranks only; gradients that one rank changed between backward() and "
            "optimizer.step() (noise, clipping by its own norm); an optimizer's state loaded or cast on some ranks "
            "only; machines or numbers of threads that round sums differently"
        )
        return f"Likely causes: {'; '.join(known)}"


def _kinds(replica: Replica) -> dict[str, dict[str, str]]:
    """Return the names, dtypes and shapes of the optimizers' state of each parameter."""
    return {
        name: {key: _kind(value) for key, value in replica.optimizers.state_of(parameter).items()}
        for name, parameter in replica.storage.parameters.items()
    }


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__
