"""Loaders that `session.data` refuses, and those of which it warns."""

from __future__ import annotations

import itertools
import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from toys import Batch, batches, flat, mlp, on_ranks, reference, sgd

import hocket
from hocket.errors import ExchangeTimeoutError, PeerLostError, TransportError, UserError
from hocket.launch.mpiexec import find_mpiexec


def steps(session: Any, data: Any) -> int:
    """Train on each batch; return how many there were."""
    number = 0
    for x, y in data:
        session.optimizer.zero_grad()
        F.cross_entropy(session.model(x), y).backward()
        session.optimizer.step()
        number += 1
    return number


def attached(strategy: str = "sgd") -> Any:
    model = mlp()
    return hocket.attach(model, sgd(model), strategy)


# ---- the same batches ----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


FORMS: dict[str, Callable[[Batch], Any]] = {
    "tuple": lambda batch: batch,
    "dict": lambda batch: {"x": batch[0], "more": {"y": [batch[1]]}},
    "arrays": lambda batch: [batch[0].numpy(), batch[1].numpy()],
    "named tuple": lambda batch: Pair(*batch),
    "text": lambda batch: [str(batch[0].tolist())],
    "bfloat16": lambda batch: batch[0].bfloat16(),
}


def iterated(loaders: list[Any], **options: Any) -> None:
    def body(rank: int) -> None:
        with attached("local") as session:
            for _ in range(2):
                for _ in session.data(loaders[rank], **options):
                    pass

    on_ranks(len(loaders), body)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_same_batches_are_told_once(
    form: Callable[[Batch], Any], caplog: pytest.LogCaptureFixture
) -> None:
    loaders = [[form(batch) for batch in batches(0, 2)] for _ in range(4)]
    with caplog.at_level(logging.WARNING, "hocket"):
        iterated(loaders)
    told = [line for line in caplog.messages if "get the same batches" in line]
    assert told == [
        "all 4 ranks get the same batches: use hocket.loader, or session.data(loader, same_batches=True) if "
        "you mean that"
    ]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_other_batches_are_not(form: Callable[[Batch], Any], caplog: pytest.LogCaptureFixture) -> None:
    iterated([[form(batch) for batch in batches(rank, 2)] for rank in range(4)])
    assert "get the same" not in caplog.text


def test_nor_the_same_ones_that_are_meant_or_cannot_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    iterated([batches(0, 2)] * 2, same_batches=True)
    iterated([[object()], [object()]])
    assert "get the same" not in caplog.text


def test_some_ranks_that_share_batches_are_named(caplog: pytest.LogCaptureFixture) -> None:
    iterated([batches(rank % 2, 2) for rank in range(3)])
    assert "ranks 0, 2 get the same batches" in caplog.text


def test_the_loader_s_attributes_are_there_but_not_its_place() -> None:
    """Most training loops print `len(loader.dataset)`; a loader's state is that of the batch after the last one."""
    samples = TensorDataset(torch.zeros(6, 5).double(), torch.zeros(6, dtype=torch.long))
    with attached() as session:
        data = session.data(hocket.loader(samples, 2))
        assert steps(session, data) == len(data) == 3
        assert len(data.dataset) == 6
        assert data.batch_sampler is not None
        with pytest.raises(AttributeError, match="'generator' object has no attribute 'dataset'"):
            _ = session.data(batch for batch in batches(0, 1)).dataset
        for name in ("state_dict", "_iterator"):
            with pytest.raises(AttributeError, match=f"session.data has no attribute '{name}'"):
                getattr(session.data(Resumable()), name)


class Resumable(list[Batch]):
    """A loader that can say where it is."""

    _iterator = None

    def state_dict(self) -> dict[str, int]:
        return {"batch": 0}


# ---- two passes at a time ------------------------------------------------------------------------------------------


def test_zip_of_two_passes_is_refused() -> None:
    def body(rank: int) -> None:
        with attached() as session:
            for _ in zip(session.data(batches(rank, 3)), session.data(batches(rank, 3)), strict=True):
                pass

    with pytest.raises(UserError, match=r"another pass over session.data has begun .* session.data\(zip\("):
        on_ranks(2, body)


def test_a_pass_within_a_pass_is_refused() -> None:
    def nested() -> None:
        with attached() as session:
            for _ in session.data(batches(0, 2)):
                steps(session, session.data(batches(1, 2)))

    with pytest.raises(UserError, match=r"another pass over session.data has begun"):
        nested()


@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "overlap_sgp"])
def test_zip_within_session_data_counts_once(strategy: str) -> None:
    def body(rank: int) -> tuple[int, int]:
        with attached(strategy) as session:
            for _ in range(2):
                both = zip(batches(rank, 3), batches(rank + 4, 4), strict=False)
                assert steps(session, (pair[0] for pair in session.data(both))) == 3
            return session.step, session.inner.epochs.ended

    assert on_ranks(2, body) == [(6, 2)] * 2


def test_an_iterator_that_somebody_still_holds_does_not_stop_the_next_pass() -> None:
    """As after an interrupt in a notebook, whose traceback keeps the loop's iterator."""
    with attached() as session:
        held = iter(session.data(batches(0, 3)))
        next(held)
        assert steps(session, session.data(batches(0, 3))) == 3
        assert session.inner.epochs.ended == 1  # the other only gave a batch to look at
        with pytest.raises(UserError, match="another pass"):
            next(held)


def test_an_iterator_that_was_read_already_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int) -> None:
        once = iter(batches(rank, 2))
        with attached("local") as session:
            for _ in range(2):
                for _ in session.data(once):
                    pass

    on_ranks(2, body)
    assert "can be read only once: create a new one for each pass" in caplog.text


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, torch.tensor(math.nan), None, "much", np.nan])
@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "local"])
def test_a_weight_that_is_none_is_refused(bad: Any, strategy: str) -> None:
    def by_length(batch: Batch) -> Any:
        by_length.calls += 1  # type: ignore[attr-defined]
        return bad if by_length.calls == 5 else 1.0  # type: ignore[attr-defined]

    def body(rank: int) -> None:
        by_length.calls = 0  # type: ignore[attr-defined]
        with attached(strategy) as session:
            steps(session, session.data(batches(rank, 3), weight=by_length if rank == 1 else None))
            steps(session, session.data(batches(rank, 3), weight=by_length if rank == 1 else None))

    expected = r"rank 1, step 4: weight=.*by_length gave .* for batch 2 of this pass over session.data"
    with pytest.raises(UserError, match=expected):
        on_ranks(2, body)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_hockets_loader_weighs_by_samples(size: int) -> None:
    samples = [(x[0], y[0]) for x, y in batches(0, 21, samples=1)]

    def body(rank: int) -> Any:
        loader = hocket.loader(samples, 8 // size, shuffle=False)  # type: ignore[arg-type]
        with attached() as session:
            for _ in range(2):
                steps(session, session.data(loader))
            return flat(session.model)

    def global_batches() -> Iterator[Any]:
        for start in range(0, 21, 8):
            xs, ys = zip(*samples[start : start + 8], strict=True)
            yield [((torch.stack(xs), torch.stack(ys)), 1.0)]

    for given in on_ranks(size, body):
        torch.testing.assert_close(given, reference(list(global_batches()) * 2), rtol=1e-12, atol=1e-13)


# ---- leaving the loop ----------------------------------------------------------------------------------------------


def left(rank: int, after: dict[int, int], strategy: str, then: Callable[[Any], Any]) -> tuple[int, int]:
    """Break after a batch of one's own; return steps and passes."""
    with attached(strategy) as session:
        # Without lengths ranks agree before each batch whether there is one.
        data = session.data((pair for pair in batches(rank, 6)) if strategy == "dpsgd" else batches(rank, 6))
        for number, (x, y) in enumerate(data, start=1):
            session.optimizer.zero_grad()
            F.cross_entropy(session.model(x), y).backward()
            session.optimizer.step()
            if number == after.get(rank):
                break
        then(session)
        return session.step, session.inner.epochs.ended


THEN: dict[str, Callable[[Any], Any]] = {
    "consensus": lambda session: session.consensus(),
    "close": lambda session: None,
    "gather": lambda session: session.gather(1),
    "distance": lambda session: session.consensus_distance(),
    "another pass": lambda session: steps(session, session.data(batches(session.rank, 2))),
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("then", THEN.values(), ids=THEN)
@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "overlap_sgp", "periodic_average", "local"])
def test_all_may_leave_at_the_same_batch(strategy: str, then: Callable[[Any], Any]) -> None:
    told = on_ranks(3, lambda rank: left(rank, {0: 3, 1: 3, 2: 3}, strategy, then))
    assert len(set(told)) == 1


@pytest.mark.one_of_each
@pytest.mark.parametrize("then", THEN.values(), ids=THEN)
@pytest.mark.parametrize("strategy", ["sgd", "overlap_sgp"])
def test_a_rank_that_leaves_alone_is_named_with_its_batch(strategy: str, then: Callable[[Any], Any]) -> None:
    with pytest.raises(
        ExchangeTimeoutError, match=r"left the loop after batch 3 of a pass over session.data"
    ) as raised:
        on_ranks(3, lambda rank: left(rank, {1: 3}, strategy, then))
    assert "rank 0" in str(raised.value)


@pytest.mark.parametrize("then", THEN.values(), ids=THEN)
def test_without_a_length_the_others_hear_of_a_rank_that_leaves_alone(then: Callable[[Any], Any]) -> None:
    expected = "rank 0 goes on after batch 3, rank 1 left after batch 3, rank 2 goes on after batch 3"
    with pytest.raises(UserError, match=expected):
        on_ranks(3, lambda rank: left(rank, {1: 3}, "dpsgd", then))


def test_ranks_that_leave_at_different_batches_without_waiting_are_told() -> None:
    expected = "rank 0 left after batch 6, rank 1 left after batch 3, rank 2 left after batch 6"
    with pytest.raises(UserError, match=expected):
        on_ranks(3, lambda rank: left(rank, {1: 3}, "periodic_average", THEN["consensus"]))


def test_a_loop_that_another_rank_s_error_has_ended_is_closed_without_a_word() -> None:
    """As the garbage collector closes it, which prints what it raises."""
    passes = {}

    def body(rank: int) -> None:
        session = attached("dpsgd")
        passes[rank] = iter(session.data(iter(batches(rank, 6))))
        next(passes[rank])
        if rank == 0:
            raise ArithmeticError
        with pytest.raises(PeerLostError):
            session.gather(1)
        passes[rank].close()

    with pytest.raises(ArithmeticError):
        on_ranks(2, body)


@pytest.mark.parametrize("others", [each for each in THEN if each != "consensus"])
def test_ranks_that_go_on_with_different_things_are_told(others: str) -> None:
    calls = {
        "close": "the session's end",
        "gather": "session.gather",
        "distance": "session.consensus_distance",
        "another pass": "the next pass over session.data",
    }
    with pytest.raises(
        UserError,
        match=rf"session\.consensus on rank 0, {re.escape(calls[others])} on ranks 1, 2\. All ranks must make",
    ):
        on_ranks(
            3,
            lambda rank: left(
                rank, dict.fromkeys(range(3), 3), "sgd", THEN["consensus" if rank == 0 else others]
            ),
        )


@pytest.mark.parametrize("others", ["close", "gather", "distance", "save", "load"])
@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "periodic_average"])
def test_different_calls_without_a_loop_are_told(strategy: str, others: str, tmp_path: Path) -> None:
    names = {"close": "the session's end", "distance": "session.consensus_distance"}
    calls = THEN | {
        "close": lambda session: session.close(),
        "save": lambda session: session.save(tmp_path),
        "load": lambda session: session.load(tmp_path, missing="start"),
    }

    def body(rank: int) -> None:
        session = attached(strategy)
        steps(session, batches(rank, 2))
        calls["consensus" if rank == 0 else others](session)

    name = re.escape(names.get(others, f"session.{others}"))
    with pytest.raises(
        TransportError, match=rf"rank 0 called session\.consensus; ranks 1 and 2 called {name}"
    ):
        on_ranks(3, body)


def test_where_nothing_is_exchanged_each_may_leave_when_it_likes() -> None:
    def body(rank: int) -> int:
        with attached("local") as session:
            return steps(session, itertools.islice(session.data(batches(rank, 6)), rank + 1))

    assert on_ranks(3, body) == [1, 2, 3]


SCRIPT = """
import sys, torch, hocket
from hocket.training.startup import defer_dynamo
defer_dynamo()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = [(torch.randn(4), torch.randn(2)) for _ in range(40)]
with hocket.attach(model, optimizer, sys.argv[1]) as session:
    for number, (x, y) in enumerate(session.data(hocket.loader(samples, 2)), start=1):
        optimizer.zero_grad(); (model(x) - y).square().mean().backward(); optimizer.step()
        if number == 3 and session.rank == 1:
            break
    session.consensus()
"""


@pytest.mark.mpi
def test_a_rank_that_leaves_alone_ends_the_job_over_mpi(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = find_mpiexec().command(3, [sys.executable, str(script), "dpsgd"], folder=tmp_path)
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode != 0
    said = " ".join(ended.stderr.split())
    assert (
        "rank 1 left the loop after batch 3 of a pass over session.data, but other ranks are still in it"
        in said
    )
    assert "rank 0 has not arrived: waiting in" in said
    assert "Traceback" not in said


def test_batches_of_conjugate_and_negated_views() -> None:
    values = torch.ones(3, dtype=torch.complex64).conj()

    def run(rank: int) -> int:
        model = mlp()
        with hocket.attach(model, sgd(model), "local") as session:
            return sum(1 for _ in session.data([(values, values.imag)]))

    assert on_ranks(2, run) == [1, 1]
