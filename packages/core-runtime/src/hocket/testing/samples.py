"""The contract of `hocket.strategy.samples` as tests, on 1 to 4 virtual ranks.

The tests of an exchange of samples are a subclass of `SamplesConformance` with one line:

    class TestRingShuffle(SamplesConformance):
        exchanges = (RingShuffle(),)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import hocket
from hocket.plain import Batch, Tree
from hocket.strategy.samples import SampleShuffle, SampleStream

if TYPE_CHECKING:
    import pytest

__all__ = ["SamplesConformance"]

T = TypeVar("T")

_EPOCHS = 3

#: The ranks' numbers of batches: all equal, some fewer, some none, none at all.
_COUNTS = ((2,), (4, 4), (3, 3, 3), (3, 5, 4, 1), (0, 3), (2, 0, 0, 1), (0, 0))

#: A batch from its samples' numbers, int64 [batch]: in the forms and dtypes that loaders give.
_FORMS: dict[str, Callable[[Tensor], Batch]] = {
    "tensor": lambda numbers: numbers,
    "pair": lambda numbers: (numbers[:, None] + torch.tensor([0.25, 0.5]), numbers.to(torch.uint8)),
    "list": lambda numbers: [numbers, numbers.to(torch.bfloat16), numbers % 2 == 0],
    "dictionary": lambda numbers: {"ids": numbers, "image": (numbers.double().view(-1, 1, 1), numbers.int())},
}


class SamplesConformance:
    """The conformance tests of exchanges of samples, for subclasses named `Test...` that list them.

    Every test runs for every exchange. An epoch is an iteration over the stream; ranks begin it together, ask for
    batches in turns or not, and leave it at its end or all after the same number of batches. The loader gives the
    same batches in each epoch, of one to three samples. A state that is saved when an epoch has ended, and before
    the next one's first batch, is that of the end: what is resumed there yields nothing in its first iteration, as
    with `hocket.task.ShardSampler`. Nobody asks for a batch before the last one has been used.

    Attributes:
        exchanges: the exchanges to test, with different fields.
    """

    exchanges: ClassVar[tuple[SampleShuffle, ...]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "exchange" in metafunc.fixturenames:
            metafunc.parametrize("exchange", self.exchanges, ids=repr)
        if "counts" in metafunc.fixturenames:
            metafunc.parametrize("counts", _COUNTS, ids=str)
        if "form" in metafunc.fixturenames:
            metafunc.parametrize("form", _FORMS)

    def test_it_is_a_configuration(self, exchange: SampleShuffle) -> None:
        assert dataclasses.is_dataclass(exchange)
        assert dataclasses.replace(exchange) == exchange
        assert hash(dataclasses.replace(exchange)) == hash(exchange)

    def test_no_sample_is_lost_or_doubled_in_any_epoch(
        self, exchange: SampleShuffle, counts: tuple[int, ...]
    ) -> None:
        data = _data(counts)
        given = _on_ranks(exchange, data, lambda stream: [list(stream) for _ in range(_EPOCHS)])
        for epoch in range(_EPOCHS):
            assert _samples(of_rank[epoch] for of_rank in given) == _samples(data)

    def test_nor_where_the_loader_has_no_length(
        self, exchange: SampleShuffle, counts: tuple[int, ...]
    ) -> None:
        data = _data(counts)
        given = _on_ranks(exchange, [_Unsized(of_rank) for of_rank in data], list)
        assert _samples(given) == _samples(data)

    def test_batches_keep_their_form(self, exchange: SampleShuffle, form: str) -> None:
        data = _data((3, 2, 4), form)
        given = _on_ranks(exchange, data, lambda stream: list(stream) + list(stream))
        forms = {_description(batch) for of_rank in data for batch in of_rank}
        assert {_description(batch) for of_rank in given for batch in of_rank} == forms
        assert _samples(given) == sorted(2 * _samples(data))

    def test_one_rank_gets_its_own_batches_in_their_order(self, exchange: SampleShuffle, form: str) -> None:
        data = _data((5,), form)
        ((first, second),) = _on_ranks(exchange, data, lambda stream: (list(stream), list(stream)))
        assert _bits(first) == _bits(second) == _bits(data[0])

    def test_the_loaders_batches_stay_as_they_are(
        self, exchange: SampleShuffle, counts: tuple[int, ...]
    ) -> None:
        data = _data(counts)
        _on_ranks(exchange, data, lambda stream: [list(stream) for _ in range(_EPOCHS)])
        assert [_bits(of_rank) for of_rank in data] == [_bits(of_rank) for of_rank in _data(counts)]

    def test_timing_decides_nothing(self, exchange: SampleShuffle, counts: tuple[int, ...]) -> None:
        """The same batches in the same order, whichever rank is first."""

        def rank_body(stream: SampleStream) -> list[Batch]:
            batches = []
            for epoch in range(_EPOCHS):
                for number, batch in enumerate(stream):
                    batches.append(batch)
                    peer = hocket.join()
                    peer.clock.elapse(1e-3 * ((peer.rank * 7 + number * 5 + epoch) % 4))
            return batches

        runs = [_on_ranks(exchange, _data(counts), rank_body, seed=seed) for seed in range(3)]
        runs.append(_on_ranks(exchange, _data(counts), lambda stream: [*stream, *stream, *stream]))
        first = [_bits(of_rank) for of_rank in runs[0]]
        for run in runs[1:]:
            assert [_bits(of_rank) for of_rank in run] == first

    def test_a_resumed_stream_goes_on_where_it_was_saved(
        self, exchange: SampleShuffle, counts: tuple[int, ...]
    ) -> None:
        """A loader that begins anew goes on before, in and at the end of an epoch."""
        cases = [(0, k) for k in range(max(counts) + 2)] + [(1, k) for k in range(1, max(counts) + 2)]
        for done, k in cases:
            self._check_resumption(exchange, counts, done, k)

    def _check_resumption(self, exchange: SampleShuffle, counts: tuple[int, ...], done: int, k: int) -> None:
        """Save after `done` epochs and k batches, or all that a rank has, and compare the batches that follow."""

        def whole(stream: SampleStream) -> tuple[Tree, list[list[Batch]]]:
            for _ in range(done):
                list(stream)
            batches = iter(stream)
            list(islice(batches, k))
            state = stream.state_dict()
            return state, [list(batches), list(stream)]

        def resumed(stream: SampleStream) -> list[list[Batch]]:
            stream.load_state_dict(states[hocket.join().rank])
            return [list(stream), list(stream)]

        unbroken = _on_ranks(exchange, _data(counts), whole)
        states = [_saved(state) for state, _ in unbroken]
        for (_, expected), given in zip(unbroken, _on_ranks(exchange, _data(counts), resumed), strict=True):
            assert [_bits(epoch) for epoch in given] == [_bits(epoch) for epoch in expected]

    def test_an_epoch_that_all_leave_early_disturbs_no_other_stream(
        self, exchange: SampleShuffle, counts: tuple[int, ...]
    ) -> None:
        data = _data(counts)

        def rank_body() -> list[Batch]:
            peer = hocket.join()
            own = data[peer.rank]
            left, other = exchange.wrap(own, peer), exchange.wrap(own, peer)
            list(islice(left, 1))
            batches = list(other)
            left.close()
            other.close()
            return batches

        assert _samples(hocket.virtual(len(counts)).run(rank_body)) == _samples(data)

    def test_nor_is_anything_lost_to_the_epochs_after_it(
        self, exchange: SampleShuffle, counts: tuple[int, ...]
    ) -> None:
        data = _data(counts)

        def rank_body(stream: SampleStream) -> list[Batch]:
            list(islice(stream, 2))
            return list(stream)

        assert _samples(_on_ranks(exchange, data, rank_body)) == _samples(data)

    def test_batches_are_the_callers_own(self, exchange: SampleShuffle, counts: tuple[int, ...]) -> None:
        """Whoever writes into them changes nothing for anybody else."""

        def rank_body(stream: SampleStream) -> list[list[Batch]]:
            epochs: list[list[Batch]] = []
            for _ in range(_EPOCHS):
                epochs.append([])
                for batch in stream:
                    epochs[-1].append(batch.clone())
                    batch.zero_()
            return epochs

        data = _data(counts)
        for epoch in zip(*_on_ranks(exchange, data, rank_body), strict=True):
            assert _samples(epoch) == _samples(data)

    def test_it_feeds_a_session(self, exchange: SampleShuffle, counts: tuple[int, ...]) -> None:
        """Samples travel between a step's own messages, also if only some ranks have batches left."""
        data = _data(counts)
        given = _trained(exchange, data)
        for epoch in range(_EPOCHS):
            assert _samples(of_rank[epoch] for of_rank in given) == _samples(data)

    def test_a_resumed_session_goes_on_with_the_same_batches(
        self, exchange: SampleShuffle, counts: tuple[int, ...], tmp_path: Path
    ) -> None:
        data = _data(counts)
        expected = _trained(exchange, data)
        epoch = max(counts)
        # After the first step, in the middle of an epoch, and around the end of each.
        stops = {1, epoch - 1, epoch, epoch + 1, epoch + epoch // 2, 2 * epoch}
        for step in sorted(stops & set(range(1, _EPOCHS * epoch))):
            given = _trained(exchange, data, tmp_path / str(step), step)
            assert [list(map(_bits, of_rank)) for of_rank in given] == [
                list(map(_bits, of_rank)) for of_rank in expected
            ]

    def test_another_loader_goes_on_with_its_own_samples(
        self, exchange: SampleShuffle, counts: tuple[int, ...]
    ) -> None:
        """One that is made anew for each epoch, of other samples and another number of batches."""
        data = _data_of_epochs(counts)
        given = _trained(exchange, data[0], of_epochs=data)
        for epoch in range(_EPOCHS):
            assert _samples(of_rank[epoch] for of_rank in given) == _samples(data[epoch])

    def test_so_does_one_that_only_some_ranks_have_made_anew(
        self, exchange: SampleShuffle, counts: tuple[int, ...]
    ) -> None:
        data = _data(counts)
        others = [data, [list(own) if rank else own for rank, own in enumerate(data)], data]
        given = _trained(exchange, data, of_epochs=others)
        for epoch in range(_EPOCHS):
            assert _samples(of_rank[epoch] for of_rank in given) == _samples(data)

    def test_a_resumed_session_whose_loaders_are_made_anew(
        self, exchange: SampleShuffle, counts: tuple[int, ...], tmp_path: Path
    ) -> None:
        """Saved in the middle of an epoch, or at the end of one after the first."""
        data = _data_of_epochs(counts)
        expected = _trained(exchange, data[0], of_epochs=data)
        ends = [sum(max(map(len, epoch)) for epoch in data[:number]) for number in range(1, _EPOCHS)]
        for step in sorted({1, *(end + more for end in ends for more in (-1, 0, 1))} - {0, ends[0]}):
            if step >= 1 and max(counts):
                given = _trained(exchange, data[0], tmp_path / str(step), step, of_epochs=data)
                assert [list(map(_bits, of_rank)) for of_rank in given] == [
                    list(map(_bits, of_rank)) for of_rank in expected
                ]

    def test_an_error_of_the_loader_reaches_the_caller(self, exchange: SampleShuffle) -> None:
        mistake = ArithmeticError("the second batch of rank 1 cannot be read")
        data: list[Iterable[Batch]] = [*_data((3, 3, 3))]
        data[1] = _Failing(_data((3, 3, 3))[1], mistake)
        raised = None
        try:
            _on_ranks(exchange, data, list)
        except ArithmeticError as error:
            raised = error
        assert raised is mistake


class _Unsized:
    """A loader without length, which can be iterated again and again."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches


class _Failing(_Unsized):
    def __init__(self, batches: Sequence[Batch], mistake: Exception) -> None:
        super().__init__(batches)
        self._mistake = mistake

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches[:1]
        raise self._mistake


def _data(counts: Sequence[int], form: str = "tensor") -> list[list[Batch]]:
    """Return each rank's batches; no two samples have the same number."""
    return [
        [_FORMS[form](torch.arange(1 + (rank + k) % 3) + 50 * rank + 4 * k) for k in range(count)]
        for rank, count in enumerate(counts)
    ]


def _data_of_epochs(counts: Sequence[int]) -> list[list[list[Batch]]]:
    """Return each epoch's batches by rank: other ones, as many as another rank has had."""
    turned = [[*counts[epoch % len(counts) :], *counts[: epoch % len(counts)]] for epoch in range(_EPOCHS)]
    return [
        [[batch + 1000 * epoch for batch in own] for own in _data(turned[epoch])] for epoch in range(_EPOCHS)
    ]


def _on_ranks(
    exchange: SampleShuffle,
    loaders: Sequence[Iterable[Batch]],
    body: Callable[[SampleStream], T],
    seed: int = 0,
) -> list[T]:
    """Wrap each rank's loader, and call `body` with the stream on as many virtual ranks."""

    def run() -> T:
        peer = hocket.join()
        stream = exchange.wrap(loaders[peer.rank], peer)
        result = body(stream)
        stream.close()
        return result

    return hocket.virtual(len(loaders), seed=seed).run(run)


def _trained(
    exchange: SampleShuffle,
    data: Sequence[Sequence[Batch]],
    folder: Path | None = None,
    stop: int = 0,
    of_epochs: Sequence[Sequence[Sequence[Batch]]] = (),
) -> list[list[list[Batch]]]:
    """Return the batches of each epoch that count in a session, by rank.

    Args:
        folder: where a session that ends after step `stop` saves itself, for another one to continue.
        stop: used with a folder only.
        of_epochs: each epoch's own loaders; the same in all epochs where none are given.
    """

    def session_body(stop: int | None, resumed: bool) -> list[list[Batch]]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = data[hocket.join().rank]
        epochs: list[list[Batch]] = [[] for _ in range(_EPOCHS)]
        strategy = dataclasses.replace(hocket.compose("sgd"), samples=exchange)
        with hocket.attach(model, optimizer, strategy) as session:
            first = session.load(folder).epoch if resumed and folder is not None else 0
            for epoch in range(first, _EPOCHS):
                for numbers in session.data(of_epochs[epoch][hocket.join().rank] if of_epochs else own):
                    if session.weight:
                        epochs[epoch].append(numbers)
                    optimizer.zero_grad()
                    model(numbers.float()[:, None] / 1000).square().mean().backward()
                    optimizer.step()
                    if folder is not None and session.step == stop:
                        session.save(folder)
                        return epochs
        return epochs

    def rank_body() -> list[list[Batch]]:
        if folder is None:
            return session_body(None, resumed=False)
        parts = session_body(stop, resumed=False), session_body(None, resumed=True)
        return [before + after for before, after in zip(*parts, strict=True)]

    return hocket.virtual(len(data)).run(rank_body)


def _samples(of_ranks: Iterable[Iterable[Batch]]) -> list[Batch]:
    """Return all samples of all ranks, sorted, each as the bytes of its row in its batch's tensors."""
    found = []
    for batches in of_ranks:
        for batch in batches:
            tensors, _ = tree_flatten(batch)
            found += list(zip(*([_bytes(row) for row in tensor] for tensor in tensors), strict=True))
    return sorted(found)


def _bits(batches: Iterable[Batch]) -> list[Batch]:
    """Return the content of batches, to the last bit, in their order."""
    return [(_description(batch), [_bytes(tensor) for tensor in tree_flatten(batch)[0]]) for batch in batches]


def _description(batch: Batch) -> str:
    """Return a batch's form: its containers, and each tensor's dtype and shape but for the number of samples."""
    return repr(tree_map(lambda leaf: (type(leaf).__name__, str(leaf.dtype), tuple(leaf.shape[1:])), batch))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _saved(state: Tree) -> Tree:
    """Return a state as a checkpoint gives it back: plain values through JSON, tensors in memory of their own."""
    assert all(isinstance(name, str) for name in state)
    tensors = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    plain = json.dumps({name: value for name, value in state.items() if name not in tensors})
    return {**json.loads(plain), **tensors}
