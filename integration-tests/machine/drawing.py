"""Sequences of moves as hypothesis draws them: what may follow what, and in which ways a step can be made."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from machine.judge import check
from machine.moves import (
    Attach,
    Close,
    Consensus,
    Crash,
    Epoch,
    Freeze,
    Hook,
    LoadAlone,
    Move,
    Poison,
    Rebind,
    Refuse,
    Save,
    Settle,
    Signal,
    Start,
    Step,
    Swap,
    Unfreeze,
    Way,
)
from machine.refusals import REFUSALS
from machine.strategies import STRATEGIES, Entry, Sparse
from machine.toy import OPTIMIZERS

_MAX_JOBS = 3
_SEEDS = st.integers(1, 999)
_WRAPS = [*[frozenset[str]()] * 5, *map(frozenset, (["called"], ["attached"], ["attached", "called"]))]
_USERS = st.sampled_from([frozenset({0, 1, 2, 3}), frozenset({0, 2}), frozenset({1}), frozenset[int]()])


@st.composite
def _ways(draw: st.DrawFn, machine: SessionMachine) -> Way:
    """Draw a way in which a step can be made with an optimizer."""
    then = draw(st.sampled_from([None, None, "mask", "clamp"]))
    if machine.optimizer in ("lbfgs", "sam"):
        return Way("closure", users=draw(_USERS), then=then)
    hows = ["plain", "plain", "accumulate", "by_hand", "sam", "closure"]
    if not _is_sparse(machine.entry):
        hows += ["twice", "surgery"]
    if machine.optimizer in ("two", "holder", "lookahead") or REFUSALS["closure"].fits(machine.entry):
        hows.remove("closure")
    how = draw(st.sampled_from(hows))
    clip, scaled = None, False
    if how in ("plain", "accumulate"):
        clip = draw(st.sampled_from([None, 0.2]))
        scaled = draw(st.booleans())
    return Way(how, clip, scaled, draw(_USERS), then)


def _is_sparse(entry: Entry) -> bool:
    return any(isinstance(r.gradients, Sparse) for r in entry.rules.values())


def _has_outer(entry: Entry) -> bool:
    return any(r.parameters is not None and r.parameters.outer is not None for r in entry.rules.values())


def _is_local(entry: Entry) -> bool:
    """Return whether ranks step with their own gradients at some time."""
    return any(r.gradients is None for r in entry.rules.values())


class SessionMachine(RuleBasedStateMachine):
    """Draws a program, move by move, and performs it at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.program: list[Move] = []
        self.ranks = 1
        self.num_jobs = 0
        self.optimizer = "sgd"
        self.wraps: frozenset[str] = frozenset()
        self.attached: Attach | None = None
        self.saved: tuple[str, int] | None = None
        self.is_frozen = self.was_frozen = self.is_over = False
        self.frozen = ""

    def add(self, *moves: Move) -> None:
        self.program += moves

    @property
    def entry(self) -> Entry:
        return STRATEGIES[self.attached.strategy if self.attached is not None else "sgd"]

    # --- jobs and sessions

    @initialize(
        ranks=st.integers(1, 4),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        wraps=st.sampled_from(_WRAPS),
        data=st.data(),
    )
    def start(self, ranks: int, optimizer: str, wraps: frozenset[str], data: st.DataObject) -> None:
        self.optimizer, self.wraps = optimizer, wraps
        self._begin_job(ranks)
        if data.draw(st.integers(0, 9)):
            self._attach(data.draw(self._attachments()))

    def _begin_job(self, ranks: int) -> None:
        self.ranks, self.attached = ranks, None
        self.num_jobs += 1
        self.is_frozen = self.was_frozen = False
        self.add(Start(ranks, self.optimizer, self.wraps))

    def _attachments(self) -> st.SearchStrategy[Attach]:
        names = [name for name, entry in STRATEGIES.items() if self._can_be_attached(entry)]
        return st.builds(Attach, st.sampled_from(names), st.booleans(), st.booleans())

    def _can_be_attached(self, entry: Entry) -> bool:
        if self.optimizer == "lbfgs" and (_is_sparse(entry) or _has_outer(entry)):
            return False  # it divides by how much gradients have changed, rounding included
        return self.optimizer not in ("lbfgs", "sam") or not REFUSALS["closure"].fits(entry)

    def _attach(self, move: Attach) -> None:
        self.attached = move
        self.was_frozen = self.is_frozen
        self.add(move)

    @precondition(lambda self: not self.is_over and self.attached is None)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        self._attach(data.draw(self._attachments()))

    @precondition(lambda self: self.can_move)
    @rule()
    def close(self) -> None:
        self.attached = None
        self.add(Close())

    @property
    def can_move(self) -> bool:
        return not self.is_over and self.attached is not None

    @precondition(lambda self: self.can_move)
    @rule()
    def settle(self) -> None:
        self.add(Settle())

    @precondition(lambda self: self.can_move)
    @rule(leaves=st.booleans())
    def consensus(self, leaves: bool) -> None:
        self.add(Consensus(leaves))

    # --- steps

    @precondition(lambda self: self.can_move)
    @rule(seed=_SEEDS, data=st.data())
    def step(self, seed: int, data: st.DataObject) -> None:
        way = data.draw(_ways(self))
        nan = data.draw(self._nan_ranks(way))
        self.add(Step(seed, way, nan))
        self._note_nan(way, nan)

    def _nan_ranks(self, way: Way) -> st.SearchStrategy[int | None]:
        """Return the ranks that may have NaN, mostly none."""
        assert self.attached is not None
        none = st.none()
        if way.how not in ("plain", "accumulate") or self.optimizer in ("lbfgs", "sam"):
            return none
        if not way.scaled and not self.attached.skips and _is_local(self.entry):
            return none
        if self.optimizer in ("holder", "lookahead") and _is_local(self.entry):
            return none  # a rank that skips it counts fewer steps, which strategies of equal replicas refuse
        if self.optimizer == "holder" and not way.scaled and not self.attached.skips:
            return none  # it has counted a step, and lowered the rate, before the step is an error
        return st.sampled_from([None, None, None, *range(self.ranks)])

    def _note_nan(self, way: Way, nan: int | None) -> None:
        if nan is not None and not way.scaled and self.attached is not None and not self.attached.skips:
            self.attached = None

    @precondition(lambda self: self.can_move)
    @rule(seed=_SEEDS, data=st.data())
    def epoch(self, seed: int, data: st.DataObject) -> None:
        move = data.draw(self._epochs(seed))
        self.add(move)
        if move.nan is not None and move.nan < self.ranks and _has_nan(move, self.ranks):
            self._note_nan(move.way, move.nan)

    def _epochs(self, seed: int) -> st.SearchStrategy[Epoch]:
        return _ways(self).flatmap(lambda way: _epochs(seed, way, self))

    # --- what is done to models

    @precondition(lambda self: self.can_move and not self.is_frozen)
    @rule(layer=st.sampled_from(["first", "beside", "last"]))
    def freeze(self, layer: str) -> None:
        if self.optimizer == "two":
            layer = "beside"  # GradScaler refuses an optimizer without any gradient
        self.is_frozen = True
        self.frozen = layer
        self.add(Freeze(layer))

    @precondition(lambda self: self.can_move and self.is_frozen and not self.was_frozen)
    @rule()
    def unfreeze(self) -> None:
        self.is_frozen = False
        self.add(Unfreeze(self.frozen))

    @precondition(lambda self: self.can_move and not self.is_frozen)
    @rule(layer=st.sampled_from(["first", "beside", "last"]), by=st.sampled_from([0.5, -1.0]))
    def hook(self, layer: str, by: float) -> None:
        self.add(Hook(layer, by))

    @precondition(lambda self: self.can_move)
    @rule(by=st.sampled_from([1.0, 0.9]))
    def rebind(self, by: float) -> None:
        self.add(Rebind(by))

    @precondition(lambda self: self.can_move)
    @rule(by=st.sampled_from([0.5, 1.1]), then=st.sampled_from(["look", "distance", "save"]))
    def swap(self, by: float, then: str) -> None:
        assert self.attached is not None
        if then == "save" and self.was_frozen:
            then = "look"
        if then == "save":
            self.saved = self.attached.strategy, self.ranks
        self.add(Swap(by, then))

    @precondition(lambda self: self.can_move)
    @rule(by=st.sampled_from([0.5, 1.1]), data=st.data())
    def load_alone(self, by: float, data: st.DataObject) -> None:
        self.add(LoadAlone(data.draw(st.integers(0, self.ranks - 1)), by))

    @precondition(lambda self: self.can_move)
    @rule(seed=_SEEDS, where=st.sampled_from(["forward", "backward", "step"]))
    def crash(self, seed: int, where: str) -> None:
        self.add(Crash(seed, where))
        self.attached = None
        self.is_frozen = False

    # --- checkpoints

    @precondition(lambda self: self.can_move and not self.was_frozen)
    @rule()
    def save(self) -> None:
        assert self.attached is not None
        self.add(Save())
        self.saved = self.attached.strategy, self.ranks

    @precondition(lambda self: not self.is_over and self.saved is not None and self.num_jobs < _MAX_JOBS)
    @rule(ranks=st.integers(1, 4), skips=st.booleans())
    def resume(self, ranks: int, skips: bool) -> None:
        """Begin another job, from the checkpoint."""
        assert self.saved is not None
        strategy, saved = self.saved
        if self.optimizer == "lbfgs":
            ranks = saved  # there is no mean of what it remembers
        self._begin_job(ranks)
        self._attach(Attach(strategy, skips=skips, loads=True))

    @precondition(lambda self: self.can_move and not self.was_frozen and self.num_jobs < _MAX_JOBS)
    @rule(seed=_SEEDS, ranks=st.integers(1, 4), data=st.data())
    def interrupt(self, seed: int, ranks: int, data: st.DataObject) -> None:
        """Save within a loop, and go on with it in another job."""
        assert self.attached is not None
        way = data.draw(_ways(self))
        move = data.draw(_interrupted(seed, way))
        self.add(move)
        self.saved = self.attached.strategy, self.ranks
        self.resume(ranks, self.attached.skips)
        self.add(move)
        self.saved = None

    @precondition(lambda self: self.can_move and not self.was_frozen and self.num_jobs < _MAX_JOBS)
    @rule(seed=_SEEDS, ranks=st.integers(1, 4), data=st.data())
    def signal(self, seed: int, ranks: int, data: st.DataObject) -> None:
        """Ask one rank to end, and go on in another job."""
        assert self.attached is not None
        way = data.draw(_ways(self))
        more = data.draw(st.tuples(*[st.integers(0, 12)] * 3))
        move = Epoch(seed, (12 * way.micros, *more), way, sized=data.draw(st.booleans()))
        self.add(Signal(move, data.draw(st.integers(0, self.ranks - 1))))
        self.saved = self.attached.strategy, self.ranks
        self.resume(ranks, self.attached.skips)
        self.add(move)
        self.saved = None

    # --- the end

    @precondition(lambda self: self.can_move and self.ranks > 1 and _is_local(self.entry))
    @precondition(lambda self: len(self.entry.rules) == 1 and self.optimizer in ("sgd", "adamw", "two"))
    @precondition(lambda self: self.attached is not None and not self.attached.skips)
    @rule(seed=_SEEDS, data=st.data())
    def poison(self, seed: int, data: st.DataObject) -> None:
        self.add(Poison(seed, data.draw(st.integers(0, self.ranks - 1))))
        self.is_over = True

    @precondition(lambda self: not self.is_over and self.refusable)
    @rule(seed=_SEEDS, data=st.data())
    def refuse(self, seed: int, data: st.DataObject) -> None:
        what = data.draw(st.sampled_from(self.refusable))
        self.add(Refuse(what, seed, data.draw(st.integers(0, self.ranks - 1))))
        self.is_over = True

    @property
    def refusable(self) -> list[str]:
        return [
            what
            for what, refusal in REFUSALS.items()
            if refusal.attached == (self.attached is not None)
            and not (refusal.several and self.ranks == 1)
            and self.optimizer in ("sgd", "adamw")
            and (self.attached is None or refusal.fits(self.entry))
            and not (what == "share_memory" and self.holds_others_memory)
        ]

    @property
    def holds_others_memory(self) -> bool:
        """Tell whether parameters hold tensors that the session has not taken over yet, and that may move."""
        last = next(
            (move for move in reversed(self.program) if isinstance(move, Rebind | Step | Epoch)), None
        )
        return isinstance(last, Rebind)

    @rule()
    def rest(self) -> None:
        """Do nothing: some move is always allowed."""

    def teardown(self) -> None:
        check(self.program)


@st.composite
def _epochs(draw: st.DrawFn, seed: int, way: Way, machine: SessionMachine) -> Epoch:
    micros = way.micros
    lengths = draw(st.tuples(*[st.integers(0, 4)] * 4).filter(lambda drawn: max(drawn[: machine.ranks]) > 0))
    if micros > 1:
        # All ranks end their last step; one with fewer batches may end within it.
        longest = -(-max(lengths[: machine.ranks]) // micros) * micros
        lengths = (longest, *lengths[1:])
    nan = draw(machine._nan_ranks(way))
    stops = draw(st.sampled_from([None, None, 1])) if nan is None else None
    is_plain = (
        way == Way(users=way.users, scaled=way.scaled)
        and len(machine.entry.rules) == 1
        and stops is None
        and nan is None
        and machine.optimizer != "holder"  # of which the session does not know
        and not (machine.optimizer == "lookahead" and _is_local(machine.entry))  # as with NaN
    )
    return Epoch(
        seed,
        lengths,
        way,
        sized=draw(st.booleans()),
        weighs=draw(st.booleans()) if micros == 1 else False,
        nan=nan,
        skips=draw(st.sampled_from([None, *range(machine.ranks)])) if is_plain and micros == 1 else None,
        stops=stops and stops * micros,
    )


@st.composite
def _interrupted(draw: st.DrawFn, seed: int, way: Way) -> Epoch:
    places = draw(st.integers(1, 2)) * way.micros
    more = draw(st.tuples(*[st.integers(0, 2)] * 3))
    lengths = (places + 2 * way.micros, *more)
    return Epoch(seed, lengths, way, sized=draw(st.booleans()), stops=places, saves=True)


def _has_nan(move: Epoch, ranks: int) -> bool:
    """Return whether the rank that is to have NaN has a batch to have it in."""
    from machine.batches import batches_of

    return any(given.is_nan is not None for given in batches_of(move, ranks))
