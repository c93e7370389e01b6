"""Rotation of samples: nothing is lost or doubled, everybody has used a sample before it comes back."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from bodies import ring_epochs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.task import TensorSamples
from hocket.testing.job import Job
from hocket.testing.samples import SamplesConformance
from hocket.transport.network import NetworkModel
from hocket_gossipgrad import RingShuffle
from hocket_gossipgrad.packed_batch import pack
from hocket_gossipgrad.ring_stream import RingStream


class TestConformance(SamplesConformance):
    exchanges = (RingShuffle(),)


def train_on(own: Any, epochs: int, note: Any, strategy: str = "local", compute_s: Any = lambda: 0.0) -> None:
    """Train on a rank's loader, in a session whose samples travel; `note(batch)` for each batch that counts."""
    peer = hocket.join()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    composed = dataclasses.replace(hocket.compose(strategy), samples=RingShuffle())
    with hocket.attach(model, optimizer, composed) as session:
        for _ in range(epochs):
            for batch in session.data(own):
                peer.clock.elapse(compute_s())
                if session.weight:
                    note(batch)
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()


@given(data=st.data(), counts=st.lists(st.integers(0, 4), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_a_sample_comes_back_when_every_other_rank_has_used_it(
    data: st.DataObject, counts: list[int], seed: int
) -> None:
    """In the order of what happens on all ranks, which compute at different speeds; uneven numbers of batches."""
    ranks = len(counts)
    slowness = data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    epochs = 2 * ranks + 1
    used: list[tuple[int, int]] = []  # (sample, rank)

    def body() -> None:
        rank = hocket.join().rank
        own = [torch.arange(1 + (rank + k) % 3) + 100 * rank + 10 * k for k in range(counts[rank])]
        train_on(
            own,
            epochs,
            lambda numbers: used.extend((number, rank) for number in numbers.tolist()),
            compute_s=lambda: 1e-3 * slowness[rank],
        )

    hocket.virtual(ranks, seed=seed).run(body)
    by_sample: dict[int, list[int]] = {}
    for sample, rank in used:
        by_sample.setdefault(sample, []).append(rank)
    assert len(by_sample) == sum(1 + (r + k) % 3 for r in range(ranks) for k in range(counts[r]))
    for sample, users in by_sample.items():
        assert users == [(sample // 100 + hop) % ranks for hop in range(epochs)]


@pytest.mark.parametrize(
    ("num_samples", "ranks", "batch_size"), [(37, 4, 3), (40, 4, 5), (5, 4, 4), (50, 3, 50)]
)
def test_data_that_the_ranks_do_not_divide(num_samples: int, ranks: int, batch_size: int) -> None:
    """With Hocket's own sampler, whose last global batch is ragged; every epoch has every sample once."""
    epochs = ranks + 1

    def body() -> list[Any]:
        samples = TensorSamples(torch.arange(num_samples)[:, None], torch.arange(num_samples))
        own = hocket.loader(samples, batch_size, seed=3)
        seen: list[Any] = []
        train_on(own, epochs, lambda batch: seen.extend(batch[1].tolist()), "gossipgrad.random")
        return seen

    counted = Counter(number for of_rank in hocket.virtual(ranks).run(body) for number in of_rank)
    assert counted == dict.fromkeys(range(num_samples), epochs)


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@pytest.mark.parametrize(
    "form",
    [
        lambda n: n,
        lambda n: (n.float()[:, None, None], n),
        lambda n: [n, [n.half()]],
        lambda n: {"image": n.to(torch.bfloat16).expand(2, -1), "label": (n % 2 == 0, n.to(torch.complex64))},
        lambda n: Pair(n.float(), n),
        lambda n: {"none": n[:0], "scalar": n.sum(), "transposed": n.repeat(3, 1).T},
    ],
)
def test_forms_travel(form: Any) -> None:
    batches = [form(torch.arange(3) + 10 * rank) for rank in range(3)]

    def body() -> list[Any]:
        peer = hocket.join()
        stream = RingShuffle().wrap([batches[peer.rank]], peer)
        seen = [batch for _ in range(4) for batch in stream]
        stream.close()
        return seen

    for rank, seen in enumerate(hocket.virtual(3).run(body)):
        for epoch, batch in enumerate(seen):
            expected = batches[(rank - epoch) % 3]
            assert type(batch) is type(expected)
            torch.testing.assert_close(batch, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ((torch.zeros(2), "cat"), "a batch holds a str, but ranks can exchange only tensors"),
        (
            {"x": torch.zeros(2, device="meta")},
            "strided tensor on meta, but ranks exchange samples in host memory",
        ),
        (torch.eye(2).to_sparse(), "sparse_coo tensor on cpu"),
    ],
)
def test_what_cannot_travel_is_named(batch: Any, what: str) -> None:
    with pytest.raises(TypeError, match=what):
        pack(batch)


@pytest.mark.parametrize("left_early", [False, True])
def test_a_loader_that_is_made_anew_for_each_epoch(left_early: bool) -> None:
    """In epoch e rank r trains on what rank (r - e) mod p reads in that epoch, in its order."""
    ranks, epochs = 3, 7

    def numbers(rank: int, epoch: int) -> list[list[int]]:
        return [[100 * epoch + 10 * rank + k] for k in range(1 + (rank + epoch) % 3)]

    def body() -> list[list[list[int]]]:
        rank = hocket.join().rank
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seen: list[list[list[int]]] = []
        with hocket.attach(model, optimizer, "gossipgrad") as session:
            for epoch in range(epochs):
                seen.append([])
                loader: DataLoader[Any] = DataLoader(torch.tensor(numbers(rank, epoch))[:, 0], batch_size=1)  # type: ignore[arg-type]
                for batch in session.data(loader):
                    if session.weight:
                        seen[-1].append(batch.tolist())
                    optimizer.zero_grad()
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()
                    if left_early:
                        break
        return seen

    for rank, seen in enumerate(hocket.virtual(ranks).run(body)):
        for epoch, batches in enumerate(seen):
            read = numbers((rank - epoch) % ranks, epoch)
            assert batches == (read[:1] if left_early else read)


def test_a_data_loader_with_workers() -> None:
    """It is read once, by its workers; afterwards its batches travel. Its order is drawn once, too."""

    def body() -> list[list[int]]:
        rank = hocket.join().rank
        torch.manual_seed(rank)
        numbers = torch.arange(20) + 100 * rank
        own = DataLoader(TensorDataset(numbers, numbers), batch_size=6, shuffle=True, num_workers=2)
        epochs: list[list[int]] = []
        for _ in range(3):
            epochs.append([])
        count = iter(range(100))
        train_on(own, 3, lambda batch: epochs[next(count) // 4].extend(batch[0].tolist()))
        return epochs

    first, second = hocket.virtual(2).run(body)
    assert sorted(first[0]) == list(range(20)) != first[0]
    assert sorted(second[0]) == list(range(100, 120))
    assert (first[1], second[1]) == (second[0], first[0])
    assert (first[2], second[2]) == (first[0], second[0])


def test_batches_that_a_model_is_validated_with_do_not_travel() -> None:
    def body(*, validates: bool) -> tuple[list[int], list[int]]:
        rank = hocket.join().rank
        own = [torch.tensor(10 * rank + k) for k in range(3)]
        seen: list[int] = []
        read: list[int] = []
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        composed = dataclasses.replace(hocket.compose("local"), samples=RingShuffle())
        with hocket.attach(model, optimizer, composed) as session:
            for _ in range(3):
                model.train()
                for batch in session.data(own):
                    seen.append(int(batch))
                    optimizer.zero_grad()
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()
                model.eval()
                for batch in session.data([torch.tensor(100 * rank + k) for k in range(2)] * validates):
                    model(torch.ones(1, 1))
                    read.append(int(batch))
            assert session.step == 9
        return seen, read

    plain = hocket.virtual(2).run(partial(body, validates=False))
    for rank, (seen, read) in enumerate(hocket.virtual(2).run(partial(body, validates=True))):
        assert seen == plain[rank][0]
        assert read == [100 * rank, 100 * rank + 1] * 3


# ------------------------------------------------------------------------------------------------ overlap

BATCH_BYTES, BATCHES, RANKS, EPOCHS = 64_000, 10, 4, 5
NETWORK = NetworkModel(latency_s=1e-4, bandwidth_bits_per_s=8 * BATCH_BYTES / 8e-3)  # a batch takes 8 ms


def timed(compute_s: float, batches: int = BATCHES) -> tuple[float, float, int]:
    """Return the seconds of all epochs, how long rank 0 waited for batches, and how many bytes it sent."""

    def body() -> tuple[float, float, int]:
        peer = hocket.join()
        stream = RingShuffle().wrap([torch.zeros(BATCH_BYTES // 4)] * batches, peer)
        assert isinstance(stream, RingStream)
        start_s = peer.clock.now()
        for _ in range(EPOCHS):
            for _ in stream:
                peer.clock.elapse(compute_s)
        told = peer.clock.now() - start_s, stream.waited_s, stream.bytes_sent
        stream.close()
        return told

    return hocket.virtual(RANKS, network=NETWORK).run(body)[0]


def test_what_travels_is_hidden_behind_computing() -> None:
    """A batch has an epoch to arrive in: only what a link cannot carry in that time shows."""
    seconds, waited_s, nbytes = timed(compute_s=0.010)
    # Polls and the telling of the forms aside.
    assert seconds == pytest.approx(EPOCHS * BATCHES * 0.010, rel=0.01)
    assert waited_s < 1e-3
    assert nbytes == EPOCHS * BATCHES * BATCH_BYTES


def test_computing_that_takes_less_than_the_transfer_waits_for_it() -> None:
    seconds, waited_s, _ = timed(compute_s=0.005)
    # From the first batch's use to the last one's arrival the links are never idle.
    busy_s = 0.005 + (EPOCHS - 1) * BATCHES * 0.008 + 0.005
    assert seconds == pytest.approx(busy_s, rel=0.01)
    assert waited_s == pytest.approx(busy_s - EPOCHS * BATCHES * 0.005, rel=0.01)


def test_one_batch_per_epoch_has_nothing_to_hide_behind() -> None:
    _, waited_s, _ = timed(compute_s=0.010, batches=1)
    assert waited_s == pytest.approx((EPOCHS - 1) * 0.0082, rel=0.05)


@pytest.mark.mpi
def test_over_mpi(job_of_3: Job) -> None:
    """With messages that need both ends, uneven numbers of batches, and more epochs than ranks."""
    counts, epochs = [3, 0, 2], 5
    given = job_of_3.run(ring_epochs, (counts, epochs))
    own = [
        [[100 * rank + 10 * k + i for i in range(1 + k % 3)] for k in range(count)]
        for rank, count in enumerate(counts)
    ]
    for rank, seen in enumerate(given):
        assert seen == [own[(rank - epoch) % 3] for epoch in range(epochs)]
