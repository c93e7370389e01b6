"""One rank of the tests of the host path: `python host_cases.py`, under mpiexec. Rank 0 prints a line of JSON."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from hocket.arrays import MixingRows
from hocket.errors import TransportError
from hocket.topology import Complete, Exponential, RandomMatching, Ring, Topology
from hocket.transport import mpi
from hocket.transport.host import SMALLEST_BYTES, HostOperation
from hocket.transport.host.descriptors import Descriptor
from hocket.transport.host.memory import HostMemory
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer, gather
from hocket.transport.reduction import tree_sum, weighted_sum
from hocket.transport.request import Request

#: Of two threads that both look at what is under way.
ROUNDS = 20 if os.environ.get("HOCKET_CELLS") == "all" else 5
BIG = SMALLEST_BYTES // 4 + 1001  # float32 elements: enough for the host path to be taken


@lru_cache(maxsize=20)
def contribution(rank: int, round: int, numel: int, dtype: str) -> np.ndarray:
    drawn = (np.random.default_rng([rank, round]).standard_normal(numel) * 100).astype(dtype)
    drawn.flags.writeable = False
    return drawn


def buffers(peer: Peer, numel: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    nbytes = numel * np.dtype(dtype).itemsize
    return peer.memory.allocate(nbytes).view(dtype), peer.memory.allocate(nbytes).view(dtype)


def mixed(terms: MixingRows, rank: int, round: int, numel: int, dtype: str) -> np.ndarray:
    """What `rank` gets: the sum that its messages would have given."""
    out = np.empty(numel, dtype)
    own = slice(terms.starts[rank], terms.starts[rank + 1])
    values = [contribution(int(source), round, numel, dtype).copy() for source in terms.sources[own]]
    weighted_sum(values, terms.weights[own].tolist(), out)
    return out


def terms_of(rows: list[list[tuple[int, float]]]) -> MixingRows:
    """The terms of a graph, given what each rank adds up."""
    starts = np.cumsum([0, *map(len, rows)])
    sources, weights = zip(*(pair for row in rows for pair in row), strict=True)
    return MixingRows(starts, np.array(sources), np.array(weights))


def mix(lane: Lane, data: np.ndarray, out: np.ndarray, terms: MixingRows) -> Request:
    mixer = lane.mixer([(data, out)])
    assert mixer is not None
    return mixer.start([terms])


def sums(peer: Peer) -> bool:
    """Sizes that do not divide by the ranks, all dtypes, two rounds, against the same tree in one process."""
    for numel in (BIG, BIG + 23):
        for dtype in ("float32", "float64", "int32", "int64"):
            send, receive = buffers(peer, numel, dtype)
            lane = peer.lane("sums", send.nbytes)
            for round in range(2):
                send[:] = given = contribution(peer.rank, round, numel, dtype)
                lane.iallreduce(send, receive).wait(20)
                expected = tree_sum([contribution(rank, round, numel, dtype) for rank in range(peer.size)])
                np.testing.assert_array_equal(receive, expected)
                np.testing.assert_array_equal(send, given)
                # The result is this rank's own: nobody reads or writes it any more.
                receive[:] = -1
                lane.iallreduce(send, send).wait(20)
                np.testing.assert_array_equal(send, expected)
            lane.close()
    # Processes that only move bytes start fast: what is heavy is imported by what needs it.
    assert not {"torch", "numba"} & set(sys.modules)
    return True


def in_place(peer: Peer) -> bool:
    """Of any size, so over shared memory or by messages, without a word to whom it is in place for."""
    for numel in (0, 1, 1000, BIG):
        data, _ = buffers(peer, numel, "float64")
        lane = peer.lane("in place", data.nbytes)
        for round in range(2):
            data[:] = contribution(peer.rank, round, numel, "float64")
            lane.iallreduce(data, data).wait(20)
            parts = [contribution(rank, round, numel, "float64") for rank in range(peer.size)]
            np.testing.assert_allclose(data, tree_sum(parts), atol=1e-9)
    return True


def orders(peer: Peer) -> bool:
    """Lanes started and waited for in another order on every rank, some requests dropped."""
    lanes = [(peer.lane(f"orders {i}", 4 * BIG), *buffers(peer, BIG, "float32")) for i in range(6)]
    draws = random.Random(peer.rank)
    for round in range(4):
        for number, (_, send, receive) in enumerate(lanes):
            send[:] = contribution(peer.rank, 100 * round + number, BIG, "float32")
            receive[:] = 0
        requests = []
        for number in draws.sample(range(6), 6):
            lane, send, receive = lanes[number]
            requests.append((number, lane.iallreduce(send, receive)))
        draws.shuffle(requests)
        for _, request in requests[1:]:
            request.wait(20)
        del requests
        peer.lane("everybody").ibarrier().wait(20)  # the dropped ones are carried out by whoever waits
        for number, (lane, send, receive) in enumerate(lanes):
            lane.iallreduce(send, receive).wait(20)
            parts = [contribution(rank, 100 * round + number, BIG, "float32") for rank in range(peer.size)]
            np.testing.assert_array_equal(receive, tree_sum(parts))
    return True


def broadcasts(peer: Peer) -> bool:
    """From every root, without a pause: the next root may write while the last one is still read from."""
    data, _ = buffers(peer, BIG, "int32")
    lane = peer.lane("broadcasts", data.nbytes)
    for round in range(3 * peer.size):
        root = round % peer.size
        if peer.rank == root:
            data[:] = contribution(root, round, BIG, "int32")
        lane.ibroadcast(data, root).wait(20)
        np.testing.assert_array_equal(data, contribution(root, round, BIG, "int32"))
    return True


def mixes(peer: Peer) -> bool:
    """Every topology, components that change from round to round, in place and not."""
    topologies: list[Topology] = [Ring(), Exponential(), Complete(), RandomMatching()]
    for dtype, numel in (("float32", BIG), ("float64", BIG - 1)):
        data, out = buffers(peer, numel, dtype)
        for topology in topologies:
            lane = peer.lane("mixes", data.nbytes)
            for round in range(4):
                terms = topology.mixing_rows(peer.size, round, 0)
                into = data if round % 2 else out
                data[:] = contribution(peer.rank, round, numel, dtype)
                mix(lane, data, into, terms).wait(20)
                np.testing.assert_array_equal(into, mixed(terms, peer.rank, round, numel, dtype))
                into[:] = -1
            lane.close()
    return True


def mixes_together(peer: Peer) -> bool:
    """Several vectors of several lengths at once, each with components of its own; who gave NaN is found in any."""
    lane = peer.lane("together", 4 * BIG)
    vectors = [buffers(peer, BIG + 500 * i, "float32") for i in range(3)]
    mixers = [lane.mixer(vectors), lane.mixer([(data, data) for data, _ in vectors])]
    for round in range(6):
        terms = [RandomMatching().mixing_rows(peer.size, round, number) for number in range(3)]
        for number, (data, _) in enumerate(vectors):
            data[:] = contribution(peer.rank, round + number, data.size, "float32")
        if round == 5 and peer.rank == 1:
            vectors[2][0][-1] = np.nan
        mixer = mixers[round % 2]
        assert mixer is not None
        found = mixer.start(terms).wait(20)
        for number, (data, out) in enumerate(vectors):
            into = data if round % 2 else out
            expected = mixed(terms[number], peer.rank, round + number, into.size, "float32")
            np.testing.assert_array_equal(into[:-1], expected[:-1])
        # Who is not in that component may have heard of it from one whom another vector connects it with.
        last = RandomMatching().neighbours(peer.rank, peer.size, round, 2)
        meets = peer.rank == 1 or 1 in last.receive_from
        assert found == (1,) if round == 5 and meets else found in ((), (1,)[: round // 5])
    return True


def mixes_in_another_order(peer: Peer) -> bool:
    """Mixes and sums on several lanes, waited for in another order on every rank; small mixes go by messages."""
    lanes: list[tuple[Lane, np.ndarray, np.ndarray]] = [
        (peer.lane(f"lanes {i}", 4 * BIG), *buffers(peer, BIG, "float32")) for i in range(4)
    ]
    draws = random.Random(peer.rank)
    for round in range(4):
        requests = []
        for number in draws.sample(range(4), 4):
            lane, data, out = lanes[number]
            data[:] = contribution(peer.rank, round, BIG, "float32")
            terms = RandomMatching().mixing_rows(peer.size, round, number)
            request = lane.iallreduce(data, out) if number == 3 else mix(lane, data, out, terms)
            requests.append((number, terms, request))
        draws.shuffle(requests)
        for number, terms, request in requests:
            request.wait(20)
            parts = [contribution(rank, round, BIG, "float32") for rank in range(peer.size)]
            expected = tree_sum(parts) if number == 3 else mixed(terms, peer.rank, round, BIG, "float32")
            np.testing.assert_array_equal(lanes[number][2], expected)
    lane, data, out = lanes[0]
    small = BIG // 10
    assert lane.mixer([(data[:small], out[:small])]) is None
    return True


def only_neighbours_wait(peer: Peer) -> bool:
    """A rank without neighbours goes through its rounds while the others have not come to theirs."""
    data, _ = buffers(peer, BIG, "float32")
    lane = peer.lane("alone", data.nbytes)
    everyone = terms_of([[(r, 0.5), ((r + 1) % peer.size, 0.5)] for r in range(peer.size)])
    lonely = peer.size - 1
    apart = terms_of([[(r, 0.5 if r == lonely else 1.0)] for r in range(peer.size)])
    if peer.rank == lonely:
        data[:] = 8
        for _ in range(3):
            mix(lane, data, data, apart).wait(20)
        assert (data == 1).all()
    peer.lane("they follow").ibarrier().wait(20)
    if peer.rank != lonely:
        for _ in range(3):
            mix(lane, data, data, apart).wait(20)
        data[:] = 1
    mix(lane, data, data, everyone).wait(20)
    return bool((data == 1).all())


def disagreement(peer: Peer) -> str:
    """One rank sums in place where the others do not: nobody's memory is written, everybody is told."""
    send, receive = buffers(peer, BIG, "float32")
    send[:] = receive[:] = 7
    lane = peer.lane("at odds", send.nbytes)
    message = ""
    try:
        lane.iallreduce(send, send if peer.rank == 0 else receive).wait(20)
    except TransportError as error:
        message = str(error)
    assert (send == 7).all()
    assert (receive == 7).all()
    return message


def dropped_mixing(peer: Peer) -> bool:
    """Who drops a mixing with all that belongs to it still does its share, in memory that is still there."""
    data, _ = buffers(peer, BIG, "float32")
    data[:] = peer.rank
    lane = peer.lane("dropped", data.nbytes)
    everyone = terms_of([[(rank, 1.0 / peer.size) for rank in range(peer.size)]] * peer.size)
    late = peer.lane("late")
    if peer.rank:
        late.ibarrier().wait(20)
        request = mix(lane, data, data, everyone)
        request.wait(20)
        return bool(np.allclose(data, (peer.size - 1) / 2))
    mix(lane, data, data, everyone)
    del data, lane
    gc.collect()
    late.ibarrier().wait(20)
    return True


def two_threads_advance(peer: Peer) -> bool:
    """A thread carries mixings on while another waits for sums: each mixing is worked on once."""
    data, out = buffers(peer, 4 * BIG, "float32")
    mixing, summing = peer.lane("mixing", data.nbytes), peer.lane("summing", out.nbytes)
    everyone = terms_of([[(rank, 1.0) for rank in range(peer.size)]] * peer.size)
    for _ in range(ROUNDS):
        data[:], out[:] = 1, 1
        request = mix(mixing, data, data, everyone)
        thread = threading.Thread(target=until_done, args=(request,))
        thread.start()
        summing.iallreduce(out, out).wait(20)
        thread.join()
        assert (data == peer.size).all()
        assert (out == peer.size).all()
        peer.lane("next").ibarrier().wait(20)
    return True


def until_done(request: Request) -> None:
    while not request.done():
        pass


def groups(peer: Peer) -> bool:
    """A group's collectives over memory that the world allocated."""
    mine = [rank for rank in range(peer.size) if rank % 2 == peer.rank % 2]
    group = peer.group(mine)
    assert group is not None
    send, receive = buffers(peer, BIG, "float32")
    send[:] = contribution(peer.rank, 0, BIG, "float32")
    lane = group.lane("groups", send.nbytes)
    lane.iallreduce(send, receive).wait(20)
    expected = tree_sum([contribution(r, 0, BIG, "float32") for r in mine])
    np.testing.assert_array_equal(receive, expected)
    lane.iallreduce(send, send).wait(20)
    np.testing.assert_array_equal(send, expected)
    return True


def why_refused(peer: Peer) -> str:
    assert isinstance(peer.memory, HostMemory)
    return peer.memory.refused


def falls_back(peer: Peer) -> str:
    """One rank cannot have the memory: all use messages, in place too, and know why."""
    from hocket.transport.host import memory

    group = peer.group(list(range(peer.size)))
    assert isinstance(group, mpi.MPIPeer)
    reserve = memory._reserve
    if peer.rank == peer.size - 1:
        memory._reserve = lambda name, nbytes: (None, "shared memory: No space left on device")
    send, receive = buffers(group, BIG, "float32")
    memory._reserve = reserve
    assert not group.memory.works_in_place(send)
    lane = group.lane("falls back", send.nbytes)
    send[:] = peer.rank
    assert lane.mixer([(send, receive)]) is None
    lane.iallreduce(send, receive).wait(20)
    assert (receive == sum(range(peer.size))).all()
    lane.iallreduce(send, send).wait(20)
    assert (send == sum(range(peer.size))).all()
    return why_refused(group)


def cannot_be_opened(peer: Peer) -> str:
    """One rank's memory is out of the others' sight, as in a PID namespace of its own: all use messages."""
    from hocket.transport.host import memory

    group = peer.group(list(range(peer.size)))
    assert isinstance(group, mpi.MPIPeer)
    with patch.object(memory, "Descriptor", _Elsewhere if peer.rank == 0 else Descriptor):
        send, receive = buffers(group, BIG, "float32")
    assert not group.memory.works_in_place(send)
    send[:] = peer.rank
    group.lane("cannot be opened", send.nbytes).iallreduce(send, receive).wait(20)
    assert (receive == sum(range(peer.size))).all()
    return why_refused(group)


class _Elsewhere(Descriptor):
    @classmethod
    def of(cls, number: int) -> Descriptor:
        return Descriptor(f"/proc/{os.getppid()}/fd/{number}", Descriptor.of(number).what)


def gossip_falls_back(peer: Peer) -> bool:
    """Parameters lie in shared memory, and none is left for the lanes' marks: what starts together goes by messages."""
    import torch

    from hocket.collective.gossip import GossipChannel
    from hocket.segment.partition import named_spans
    from hocket.segment.segment import Segment
    from hocket.transport.host import memory

    group = peer.group(list(range(peer.size)))
    assert isinstance(group, mpi.MPIPeer)
    segments = []
    for index in range(2):
        data, _ = buffers(group, BIG, "float32")
        parameters = torch.from_numpy(data)
        spans = named_spans([("weight", parameters)])
        segments.append(Segment(f"segment {index}", index, spans, parameters, parameters))
    reserve = memory._reserve
    memory._reserve = lambda name, nbytes: (None, "shared memory: No space left on device")
    channel = GossipChannel(group, segments, RandomMatching())
    memory._reserve = reserve
    [together] = channel.groups
    for round in range(3):
        for segment in together:
            segment.outgoing_array[:] = contribution(group.rank, round + segment.index, BIG, "float32")
        channel.start(together, round).wait(20)
        for segment in together:
            terms = RandomMatching().mixing_rows(group.size, round, segment.index)
            expected = mixed(terms, group.rank, round + segment.index, BIG, "float32")
            np.testing.assert_array_equal(segment.incoming_array, expected)
            assert not channel.finds_nonfinite(segment)
    channel.close()
    return True


CASES = (
    sums,
    in_place,
    orders,
    broadcasts,
    mixes,
    mixes_in_another_order,
    mixes_together,
    only_neighbours_wait,
    dropped_mixing,
    two_threads_advance,
    disagreement,
    groups,
    falls_back,
    cannot_be_opened,
    gossip_falls_back,
)


def main() -> None:
    peer = mpi.join()
    taken = []
    begin = HostOperation.__init__

    def counted(*args: Any) -> None:
        taken.append(1)
        begin(*args)

    HostOperation.__init__ = counted  # type: ignore[assignment, method-assign]
    results: dict[str, Any] = {}
    for case in CASES:
        before = len(taken)
        results[case.__name__] = {"result": case(peer), "over shared memory": len(taken) - before}
    send, receive = buffers(peer, BIG, "float32")
    assert peer.memory.works_in_place(send)
    assert not peer.memory.works_in_place(send[:1000])
    assert not peer.memory.works_in_place(np.zeros(BIG, "float32"))
    send[:] = contribution(peer.rank, 7, BIG, "float32")
    peer.lane("bits", send.nbytes).iallreduce(send, receive).wait(20)
    results["bits"] = hashlib.sha256(receive.tobytes()).hexdigest()
    maps = Path("/proc/self/maps").read_text().splitlines()
    results["mapped"] = [line for line in maps if "/memfd:hocket-" in line]
    told = gather(peer, results)
    if peer.rank == 0:
        print("\nRESULTS " + json.dumps(told), flush=True)
    peer.close()


if __name__ == "__main__":
    main()
