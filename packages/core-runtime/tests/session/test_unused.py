"""Words on gradients that no step uses: none for programs that drop some on purpose, one for a rank that does so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from toys import batches, mlp, on_ranks, sgd

import hocket
from hocket.errors import DisagreementError


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "without optimizer.step()" in line]


def train_gan(through: str, leaves_out: int | None) -> float:
    """Train a second network whose loss goes through the first one, which steps first; return a distance."""
    loader = batches(hocket.join().rank, 5)
    first = mlp()
    size = loader[0][0].shape[1]
    second = torch.nn.Linear(size, size, dtype=loader[0][0].dtype)
    optimizers = sgd(first), torch.optim.SGD(second.parameters(), lr=0.1)
    with (
        hocket.attach(first, optimizers[0], "sgd") as session,
        hocket.attach(second, optimizers[1], "sgd") as other,
    ):
        sessions = {"first": session, "second": other}
        for number, (x, y) in enumerate(sessions[through].data(loader) if through in sessions else loader):
            optimizers[0].zero_grad()
            F.cross_entropy(first(x), y).backward()
            F.cross_entropy(first(second(x).detach()), y).backward()
            if number == leaves_out:
                continue
            optimizers[0].step()
            optimizers[1].zero_grad()
            F.cross_entropy(first(second(x)), y).backward()
            optimizers[1].step()
        return session.consensus_distance()


@pytest.mark.parametrize("through", ["loader", "first", "second"])
def test_a_network_through_which_anothers_loss_goes_is_no_mistake(
    through: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert on_ranks(2, lambda rank: train_gan(through, None)) == [0.0, 0.0]
    assert told(caplog) == []


def test_a_batch_that_such_a_network_leaves_out_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(2, lambda rank: train_gan("loader", 2))
    assert len(told(caplog)) == 2
    assert all("backward() at step 2" in line for line in told(caplog))


@pytest.mark.parametrize("through_data", [True, False])
def test_gradients_that_every_step_drops_are_no_mistake(
    through_data: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As gradient surgery and SAM do."""

    def run(rank: int) -> float:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "agd") as session:
            loader = batches(rank, 4)
            for x, y in session.data(loader) if through_data else loader:
                for task in (0, 1):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), (y + task) % 2).backward()
                optimizer.step()
            return session.consensus_distance()

    assert on_ranks(2, run) == [0.0, 0.0]
    assert told(caplog) == []


def test_a_rank_that_leaves_out_its_very_first_batch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            for number, (x, y) in enumerate(batches(rank, 4)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if number == rank == 0:
                    continue
                optimizer.step()
            session.consensus()

    with pytest.raises(
        DisagreementError, match=r"backwards without optimizer.step\(\): 1 on rank 0, 0 on rank 1"
    ):
        on_ranks(2, run)
    [line] = told(caplog)
    assert "rank 0: backward() at step 0" in line
