"""Collectives as schedules, for any number of ranks: allreduces, gathers, a broadcast and an activation.

Of the allreduces, recursive doubling has the fewest stages, a ring sends the fewest bytes, Rabenseifner's sends as few
in as many stages as two trees where ranks are a power of two, and a tree of large arity has the fewest messages: with
more ranks than cores, the number of wake-ups of a rank counts most.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), sec. 4,
of which 4.5 has Rabenseifner's allreduce;
for numbers of ranks that are no power of two, the extra ranks hand their data to a neighbour first and get the result
from it last; the allgather is Bruck's (sec. 4.1).
The activation is that of eager-SGD (Li et al.), sec. 4.1.1: "a modified version of the recursive doubling
communication scheme ... equivalent to the union of P binomial trees". There partners are r xor 2^s, which exist for
powers of two only; here the partner of stage s is r + 2^s modulo P, which makes the same trees for any P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hocket.arrays import Array
from hocket.schedule.operations import Add, Logic, NoOp, Operation, Receive, Send
from hocket.schedule.schedule import Schedule, chain

#: Of a ring's shares. Four parts shortened steps of `sgd` between four hosts by 3 to 5 % (1 Gbit/s, 10 and 26 MB).
_MOST_PARTS = 4
_LEAST_PART_BYTES = 1 << 18


def recursive_doubling_allreduce(rank: int, size: int, data: Array) -> Schedule:
    """Return this rank's part of summing all ranks' `data` in place, in about log2(size) stages.

    Every rank gets the same bits: partners add the same two numbers, and a + b is b + a.
    It sends log2(size) times the buffer and needs room for two more.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        data: floats or integers, the same shape and dtype on every rank.

    Returns:
        A schedule with the trigger `start`, which holds back all operations on `data`.
    """
    num_stages = size.bit_length() - 1
    build = _Builder(data, num_tags=2 + num_stages)

    def double(partners: list[int]) -> None:
        for stage, partner in enumerate(partners):
            build.exchange(f"stage {stage}", partner, tag=2 + stage)

    _among_power_of_two(rank, size, build, double)
    return build.finish()


def rabenseifner_allreduce(rank: int, size: int, data: Array) -> Schedule:
    """Return this rank's part of summing all ranks' `data` in place: halves are summed, then handed back.

    Partners swap halves and add, then halves of these with other partners, until each holds the sum of one share:
    recursive halving. The same partners in reverse hand each other their sums: recursive doubling. Neighbours swap the
    largest halves, as those often have one host. Every rank gets the same bits, as each share is summed up once. Of
    powers of two it sends 2 (size - 1) / size times the buffer in 2 log2(size) stages, and needs room for another;
    other numbers of ranks send the whole buffer once to and once from one before.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        data: floats or integers, the same shape and dtype on every rank; shares may be empty.

    Returns:
        A schedule with the trigger `start`, which holds back all operations on `data`.
    """
    num_stages = size.bit_length() - 1
    build = _Builder(data.reshape(-1), num_tags=2 + 2 * num_stages)

    def halve_and_double(partners: list[int]) -> None:
        begin, end = 0, data.size
        given: list[tuple[int, int]] = []
        for stage, partner in enumerate(partners):
            middle = (begin + end) // 2
            kept, gone = (begin, middle), (middle, end)
            if partner < rank:
                kept, gone = gone, kept
            build.swap(f"halve {stage}", partner, gone, kept, tag=2 + stage)
            given.append(gone)
            begin, end = kept
        for stage, (partner, gone) in reversed(list(enumerate(zip(partners, given, strict=True)))):
            build.hand_back(f"double {stage}", partner, (begin, end), gone, tag=2 + num_stages + stage)
            begin, end = min(begin, gone[0]), max(end, gone[1])

    _among_power_of_two(rank, size, build, halve_and_double)
    return build.finish()


def _among_power_of_two(rank: int, size: int, build: _Builder, run: Callable[[list[int]], None]) -> None:
    """Build an allreduce among the largest power of two of ranks; others pass data and sum by a partner.

    Args:
        rank, size: as for the allreduce.
        build: the chain to add to, with tags 0 and 1 for the others.
        run: builds the part among the power of two, from this rank's partners, one for each stage, the nearest first.
    """
    core = 1 << (size.bit_length() - 1)
    extras = size - core
    # Of the first 2 * extras ranks the odd ones fold into the even ones before them.
    if rank < 2 * extras and rank % 2:
        build.send("fold", rank - 1, tag=0)
        build.replace("unfold", rank - 1, tag=1)
        return
    if rank < 2 * extras:
        build.add("fold", rank + 1, tag=0)
    number = rank // 2 if rank < 2 * extras else rank - extras
    numbers = [number ^ (1 << stage) for stage in range(core.bit_length() - 1)]
    run([2 * partner if partner < extras else partner + extras for partner in numbers])
    if rank < 2 * extras:
        build.send("unfold", rank + 1, tag=1)


class _Builder:
    """A chain of steps on `data`, each of which waits for the one before."""

    def __init__(self, data: Array, num_tags: int) -> None:
        self._data = data
        self._num_tags = num_tags
        self._operations: list[Operation] = [NoOp("start")]
        self._done: tuple[str, ...] = ("start",)
        self._sent_of: dict[tuple[int, int], str] = {}  # by what `swap` gave away, its send
        # Two places to receive into, taken in turn, so that the next stage's receive is posted ahead.
        self._staging = (np.empty_like(data), np.empty_like(data))
        self._additions: list[str] = []

    def send(self, name: str, to: int, tag: int) -> None:
        """Send `data`."""
        self._operations.append(Send(f"{name}: send", self._done, data=self._data, to=to, tag=tag))
        self._done = (f"{name}: send",)

    def replace(self, name: str, source: int, tag: int) -> None:
        """Receive into `data`."""
        receive = Receive(f"{name}: receive", self._done, data=self._data, source=source, tag=tag)
        self._operations.append(receive)
        self._done = (receive.name,)

    def add(self, name: str, source: int, tag: int) -> None:
        """Receive and add to `data`."""
        data, staged = self._data, self._staging[len(self._additions) % 2]
        free = tuple(self._additions[-2:-1])  # the addition that read from this place
        receive = Receive(f"{name}: receive", free, data=staged, source=source, tag=tag)
        self._operations.append(receive)
        add = Add(f"{name}: add", (*self._done, receive.name), total=data, addend=staged)
        self._operations.append(add)
        self._additions.append(add.name)
        self._done = (add.name,)

    def exchange(self, name: str, partner: int, tag: int) -> None:
        """Send `data` to `partner` and add its message."""
        self.send(name, partner, tag)
        self.add(name, partner, tag)

    def swap(self, name: str, partner: int, gone: tuple[int, int], kept: tuple[int, int], tag: int) -> None:
        """Send elements `gone` of the flat `data`, a range (start, stop), and add those received to `kept`."""
        sent = Send(f"{name}: send", self._done, data=self._data[slice(*gone)], to=partner, tag=tag)
        total = self._data[slice(*kept)]
        staged = self._staging[len(self._additions) % 2][: total.size]
        free = tuple(self._additions[-2:-1])
        receive = Receive(f"{name}: receive", free, data=staged, source=partner, tag=tag)
        # What is sent lies apart from what is added to: neither waits for the other.
        add = Add(f"{name}: add", (*self._done, receive.name), total=total, addend=staged)
        self._operations += [sent, receive, add]
        self._sent_of[gone] = sent.name
        self._additions.append(add.name)
        self._done = (add.name,)

    def hand_back(
        self, name: str, partner: int, have: tuple[int, int], gone: tuple[int, int], tag: int
    ) -> None:
        """Send elements `have`, and receive those that `swap` gave to the same partner."""
        sent = Send(f"{name}: send", self._done, data=self._data[slice(*have)], to=partner, tag=tag)
        came = (self._sent_of[gone],)  # nothing else reads or writes there
        receive = Receive(f"{name}: receive", came, data=self._data[slice(*gone)], source=partner, tag=tag)
        self._operations += [sent, receive]
        self._done = (*self._done, receive.name)

    def finish(self) -> Schedule:
        return Schedule(tuple(self._operations), self._done, trigger="start", num_tags=self._num_tags)


def ring_allreduce(rank: int, size: int, data: Array) -> Schedule:
    """Return this rank's part of summing all ranks' `data` in place, by passing shares around a ring.

    Every rank gets the same bits, as each share is summed up once and then handed on. It sends 2 (size - 1) / size
    times the buffer, in 2 (size - 1) steps, and needs room for one share more. Large shares go around in up to four
    parts, so that one part travels while another is added.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        data: floats or integers, the same shape and dtype on every rank; shares may be empty.

    Returns:
        A schedule with the trigger `start`, which holds back all operations on `data`.
    """
    num_parts = min(max(1, data.nbytes // (size * _LEAST_PART_BYTES)), _MOST_PARTS)
    shares = [np.array_split(share, num_parts) for share in np.array_split(data.reshape(-1), size)]
    operations: list[Operation] = [NoOp("start")]
    done = tuple(
        _ring_of_part(operations, rank, [share[part] for share in shares], part) for part in range(num_parts)
    )
    num_tags = max(2 * (size - 1), 1) * num_parts
    return Schedule(tuple(operations), done, trigger="start", num_tags=num_tags)


def _ring_of_part(operations: list[Operation], rank: int, shares: Sequence[Array], part: int) -> str:
    """Append the ring of a part of all shares to `operations`, and return the name of its last operation."""
    size = len(shares)
    staging = np.empty_like(shares[0])  # the largest
    left, right = (rank - 1) % size, (rank + 1) % size
    done: tuple[str, ...] = ("start",)
    sends: list[str] = []
    for step in range(2 * (size - 1)):
        going, coming = shares[(rank - step) % size], shares[(rank - step - 1) % size]
        tag = 2 * (size - 1) * part + step
        name = f"part {part}, step {step}"
        sends.append(f"{name}: send")
        operations.append(Send(sends[-1], done, data=going, to=right, tag=tag))
        receive = f"{name}: receive"
        if step < size - 1:
            staged = staging[: coming.size]
            # The first is pre-posted; the others wait until the one before has left the staging place.
            posted = done if step else ()
            operations.append(Receive(receive, posted, data=staged, source=left, tag=tag))
            done = (f"{name}: add",)
            after = (*(["start"] if not step else []), receive)
            operations.append(Add(done[0], after, total=coming, addend=staged))
        else:
            # What is overwritten here was sent `size - 1` steps ago at the latest.
            sent = sends[step - size + 1]
            operations.append(Receive(receive, (*done, sent), data=coming, source=left, tag=tag))
            done = (receive,)
    return done[0]


def tree_allreduce(rank: int, size: int, data: Array, arity: int = 2) -> Schedule:
    """Return this rank's part of summing all ranks' `data` in place, up a tree to rank 0 and down again.

    Every rank gets the same bits, those of rank 0. 2 (size - 1) messages are sent, and no rank without children is
    woken more than twice; others need room for one buffer for each child.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        data: floats or integers, the same shape and dtype on every rank.
        arity: most children of a rank; `size - 1` makes it a star.

    Returns:
        A schedule with the trigger `start`, which holds back all operations on `data`.
    """
    children = range(arity * rank + 1, min(arity * (rank + 1), size - 1) + 1)
    staging = [np.empty_like(data) for _ in children]

    operations: list[Operation] = [NoOp("start")]
    have = "start"
    for child, staged in zip(children, staging, strict=True):
        receive = f"up {child}: receive"
        operations.append(Receive(receive, data=staged, source=child))
        # In order of the children, whoever comes first, so that every round adds alike.
        operations.append(Add(f"up {child}: add", (have, receive), total=data, addend=staged))
        have = f"up {child}: add"
    if rank:
        parent = (rank - 1) // arity
        operations.append(Send("up: send", (have,), data=data, to=parent))
        have = "down: receive"
        operations.append(Receive(have, ("up: send",), data=data, source=parent))
    # Through a no-op, so that what follows in a chain fires before these sends, each of which wakes another rank.
    operations.append(NoOp("down", (have,)))
    for child in children:
        operations.append(Send(f"down {child}: send", ("down",), data=data, to=child))
    return Schedule(tuple(operations), (have,), trigger="start")


def binomial_broadcast(rank: int, size: int, data: Array, root: int = 0) -> Schedule:
    """Return this rank's part of a broadcast of `root`'s `data`, in ceil(log2 size) stages.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        data: sent by `root`, received into elsewhere; the same number of bytes on every rank.
        root: the rank that sends its data.

    Returns:
        A schedule with the trigger `start`, which on other ranks than the root holds the receive back until the
        application allows `data` to be overwritten.
    """
    place = (rank - root) % size  # counted from the root, whose place is 0
    operations: list[Operation] = [NoOp("start")]
    have = "start"
    # The lowest bit of a place is the stage at which it receives; the root has data from before the first.
    reach = place & -place if place else 1 << (size - 1).bit_length()
    if place:
        have = "receive"
        operations.append(Receive(have, ("start",), data=data, source=(place - reach + root) % size))
    while reach > 1:
        reach >>= 1
        if place + reach < size:
            to = (place + reach + root) % size
            operations.append(Send(f"send to {to}", (have,), data=data, to=to))
    return Schedule(tuple(operations), (have,), trigger="start")


def binomial_reduce(rank: int, size: int, data: Array, root: int = 0) -> Schedule:
    """Return this rank's part of summing all ranks' `data` into `root`'s, in ceil(log2 size) stages.

    A rank adds received data to its `data`, which is overwritten, and sends that on.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        data: floats or integers, the same shape and dtype on every rank.
        root: the rank that gets the sum.

    Returns:
        A schedule with the trigger `start`, which holds back all operations on `data`.
    """
    place = (rank - root) % size  # counted from the root, whose place is 0
    build = _Builder(data, num_tags=1)
    reach = 1
    while reach < size and not place & reach:
        if place + reach < size:
            build.add(f"from place {place + reach}", (place + reach + root) % size, tag=0)
        reach <<= 1
    if place:
        build.send("up", (place - reach + root) % size, tag=0)
    return build.finish()


def binomial_allreduce(rank: int, size: int, data: Array) -> Schedule:
    """Return this rank's part of summing all ranks' `data` in place, up a binomial tree and down again.

    Every rank gets the same bits, those of rank 0, the root, in 2 ceil(log2 size) stages. 2 (size - 1) messages are
    sent, each of the whole buffer; there is room for two more.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        data: floats or integers, the same shape and dtype on every rank.

    Returns:
        A schedule with the trigger `up.start`, which holds back all operations on `data`.
    """
    up, down = binomial_reduce(rank, size, data), binomial_broadcast(rank, size, data)
    return chain(("up", up), ("down", down))


def alltoall(rank: int, size: int, send: Array, receive: Array) -> Schedule:
    """Return this rank's part of handing every other rank a row of its own.

    Messages go in rotation: each rank begins with the one after it, so that no link gets two at once. `size` - 1 rows
    are sent, in one stage.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        send: [size, n]; row i goes to rank i; this rank's own row stays.
        receive: [size, n]; row i gets rank i's message; this rank's own row is not touched.

    Returns:
        A schedule with the trigger `start`, which holds the sends back; `receive` must be free from the beginning.
    """
    operations: list[Operation] = [NoOp("start")]
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        operations.append(Receive(f"receive from {source}", data=receive[source], source=source))
        operations.append(Send(f"send to {to}", ("start",), data=send[to], to=to))
    last = tuple(operation.name for operation in operations if isinstance(operation, Receive))
    return Schedule(tuple(operations), last or ("start",), trigger="start")


def allgather(rank: int, size: int, rows: Array) -> Schedule:
    """Return this rank's part of gathering all ranks' rows everywhere, in ceil(log2 size) stages.

    It sends `size` - 1 rows: at each stage all of its rows that the partner lacks.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        rows: [size, n]; row i is that of rank (rank + i) modulo size, so that the first is this rank's own.

    Returns:
        A schedule with the trigger `start`; the rows of others must be free from the beginning.
    """
    operations: list[Operation] = [NoOp("start")]
    have, stage = 1, 0
    done: tuple[str, ...] = ("start",)
    while have < size:
        more = min(have, size - have)
        receive = f"stage {stage}: receive"
        operations.append(
            Receive(receive, data=rows[have : have + more], source=(rank + have) % size, tag=stage)
        )
        operations.append(
            Send(f"stage {stage}: send", done, data=rows[:more], to=(rank - have) % size, tag=stage)
        )
        have, done, stage = have + more, (*done, receive), stage + 1
    return Schedule(tuple(operations), done, trigger="start", num_tags=max(stage, 1))


def activation_broadcast(rank: int, size: int) -> Schedule:
    """Return this rank's part of the activation: it ends as soon as any rank has activated this one.

    Every rank can be the initiator, and several can at once: a rank that receives at stage s forwards at the stages
    after s, and a rank that is activated twice forwards once. The initiator sends ceil(log2 size) notices and all ranks
    are activated within as many stages; with one initiator 2^ceil(log2 size) - 1 notices are sent, which is one per
    rank for powers of two.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.

    Returns:
        A schedule with the trigger `arrive` that ends with `active`.
    """
    num_stages = (size - 1).bit_length()
    operations: list[Operation] = [NoOp("arrive")]
    callers = ["arrive"]
    for stage in range(num_stages):
        to, source = (rank + (1 << stage)) % size, (rank - (1 << stage)) % size
        operations.append(Send(f"call {stage}", tuple(callers), Logic.ANY, to=to, tag=stage))
        operations.append(Receive(f"called {stage}", source=source, tag=stage))
        callers.append(f"called {stage}")
    operations.append(NoOp("active", tuple(callers), Logic.ANY))
    return Schedule(tuple(operations), ("active",), trigger="arrive", num_tags=max(num_stages, 1))
