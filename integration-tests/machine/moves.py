"""The moves of a user. A program is a sequence of moves, and all ranks run it."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any


class Written:
    """Is written as it would be in a script: without what is as always."""

    def __repr__(self) -> str:
        told: list[Any] = [(field, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        given = (f"{f.name}={value!r}" for f, value in told if f.default is MISSING or f.default != value)
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Start(Written):
    """A job begins: so many ranks, each with a new model.

    Attributes:
        ranks: how many, 1 to 4.
        optimizer: which one, of `toy.OPTIMIZERS`.
        wraps: a module that holds the model: `called` in its place, `attached`, or both; none where empty.
    """

    ranks: int
    optimizer: str = "sgd"
    wraps: frozenset[str] = frozenset()


@dataclass(frozen=True, repr=False)
class Attach(Written):
    """Attach a strategy of `strategies.STRATEGIES`.

    Attributes:
        keeps: whether each rank begins with parameters of its own.
        skips: whether steps with NaN or Inf are skipped; else they are errors.
        loads: whether the newest checkpoint is loaded.
    """

    strategy: str
    keeps: bool = False
    skips: bool = False
    loads: bool = False


@dataclass(frozen=True, repr=False)
class Close(Written):
    """Close the session."""


@dataclass(frozen=True, repr=False)
class Way(Written):
    """The way in which a step is made.

    Attributes:
        how: plain; twice: two backwards, whose gradients add up; closure: `optimizer.step(closure)`; sam: in the
            loop, by setting `p.data`; by_hand: `p.grad` is set, without a backward; accumulate: over two batches,
            with `session.accumulate()`; surgery: two tasks' gradients, kept as lists, are put together by hand.
        clip: the largest norm of a gradient.
        scaled: whether a GradScaler scales.
        users: the ranks whose batches need the layer beside.
        then: what is done to the weights after the step: mask or clamp.
    """

    how: str = "plain"
    clip: float | None = None
    scaled: bool = False
    users: frozenset[int] = frozenset({0, 1, 2, 3})
    then: str | None = None

    @property
    def micros(self) -> int:
        """The number of batches in a step."""
        return 2 if self.how == "accumulate" else 1


@dataclass(frozen=True, repr=False)
class Step(Written):
    """One step, outside of `session.data`.

    Attributes:
        nan: the rank whose loss is NaN.
    """

    seed: int
    way: Way = Way()
    nan: int | None = None


@dataclass(frozen=True, repr=False)
class Epoch(Written):
    """A loop over `session.data`.

    Attributes:
        lengths: each rank's number of batches.
        sized: whether the loaders have a length.
        weighs: whether the batches count differently.
        nan: the rank whose loss is NaN in the second batch.
        skips: the rank that leaves its first batch out, by `continue`.
        stops: after so many steps all ranks break.
        saves: whether they save first.
    """

    seed: int
    lengths: tuple[int, int, int, int]
    way: Way = Way()
    sized: bool = True
    weighs: bool = False
    nan: int | None = None
    skips: int | None = None
    stops: int | None = None
    saves: bool = False


@dataclass(frozen=True, repr=False)
class Settle(Written):
    """Finish what is under way."""


@dataclass(frozen=True, repr=False)
class Consensus(Written):
    """Set all replicas to their mean; with `leaves` only for a look at it."""

    leaves: bool = False


@dataclass(frozen=True, repr=False)
class Freeze(Written):
    """Freeze a layer of an attached model."""

    layer: str


@dataclass(frozen=True, repr=False)
class Unfreeze(Written):
    """Let a layer be trained again."""

    layer: str


@dataclass(frozen=True, repr=False)
class Hook(Written):
    """Have a tensor's hook multiply the gradient of a layer's weight."""

    layer: str
    by: float


@dataclass(frozen=True, repr=False)
class Swap(Written):
    """Set weights aside by reference, as averages of weights do, let others take their place, and give them back.

    Attributes:
        by: what the others are in terms of the weights.
        then: what is done with the others: look (at their consensus), distance, or save.
    """

    by: float
    then: str


@dataclass(frozen=True, repr=False)
class LoadAlone(Written):
    """Let one rank load weights, the others not, and then set replicas to their mean where they are to be equal."""

    rank: int
    by: float


@dataclass(frozen=True, repr=False)
class Signal(Written):
    """Ask one rank to end, in the third step of an epoch: all save and leave after one step; the job ends there."""

    epoch: Epoch
    rank: int


@dataclass(frozen=True, repr=False)
class Rebind(Written):
    """Give every parameter another tensor, of values scaled by `by`."""

    by: float = 1.0


@dataclass(frozen=True, repr=False)
class Save(Written):
    """Save a checkpoint."""


@dataclass(frozen=True, repr=False)
class Crash(Written):
    """An error in the loop on all ranks, after which models and optimizers are made anew.

    Attributes:
        where: forward, backward or step: what it comes after.
    """

    seed: int
    where: str


@dataclass(frozen=True, repr=False)
class Poison(Written):
    """A rank's parameters become NaN, by a gradient that stays there; has to be an error before others have them."""

    seed: int
    rank: int


@dataclass(frozen=True, repr=False)
class Refuse(Written):
    """Something that is refused, with its cure, at once or in the step that follows; the program ends there.

    Attributes:
        what: see `script.refusable`.
        rank: where it is done, if not everywhere.
    """

    what: str
    seed: int
    rank: int = 0


Move = (
    Start
    | Attach
    | Close
    | Step
    | Epoch
    | Settle
    | Consensus
    | Freeze
    | Unfreeze
    | Hook
    | Swap
    | LoadAlone
    | Signal
    | Rebind
    | Save
    | Crash
    | Poison
    | Refuse
)
Program = list[Move]
