"""The appendix's checks: W is doubly stochastic, and without gradients replicas and master contract as fast as zeta."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from toys import batch, chain, flat, sgd, stages_of

import hocket
from hocket_eapipe import Pipeline
from hocket_eapipe.weights.elastic import pull

Matrix = NDArray[np.float64]


def coupling(num_replicas: int, alpha: float) -> Matrix:
    """Return W = M^1 ... M^N, [N + 1, N + 1], M^l as lemma 1 gives it."""
    product = np.eye(num_replicas + 1)
    for replica in range(num_replicas):
        m = np.eye(num_replicas + 1)
        m[replica, replica] = m[-1, -1] = 1 - alpha
        m[replica, -1] = m[-1, replica] = alpha
        product = product @ m
    return product


def zeta(w: Matrix) -> float:
    return float(np.linalg.norm(w - np.full_like(w, 1 / len(w)), 2))


@given(num_replicas=st.integers(1, 50), alpha=st.floats(0.01, 0.99))
def test_w_is_doubly_stochastic_and_contracts(num_replicas: int, alpha: float) -> None:
    """W is what the code does: a column for each value, as it goes into a round of pulls."""
    values = [torch.from_numpy(row.copy()) for row in np.eye(num_replicas + 1)]
    for replica in values[:-1]:
        pull([replica], [values[-1]], alpha)
    w = coupling(num_replicas, alpha)
    # A row is a model here, and a column in the paper.
    np.testing.assert_allclose(torch.stack(values).numpy().T, w, atol=1e-12)
    np.testing.assert_allclose(w.sum(0), 1)
    np.testing.assert_allclose(w.sum(1), 1)
    assert w.min() >= 0
    assert zeta(w) < 1


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_without_learning_rate_all_meet_in_their_mean(num_stages: int, alpha: float) -> None:
    """After n rounds of N batches the distance from the mean is at most zeta^n of what it was; the mean stays."""
    rounds = 6
    [(mean, distances)] = hocket.virtual(1).run(lambda: contracted(num_stages, alpha, rounds))
    rate = zeta(coupling(num_stages, alpha))
    for number, distance in enumerate(distances):
        assert distance <= rate**number * distances[0] * (1 + 1e-9)
    assert distances[-1] < distances[0]
    torch.testing.assert_close(mean[-1], mean[0], rtol=1e-12, atol=1e-13)


def contracted(num_stages: int, alpha: float, rounds: int) -> tuple[list[torch.Tensor], list[float]]:
    """Return the mean of replicas and master, and their distance from it, after each round."""
    model = chain(num_stages)
    optimizer = sgd(model, lr=0.2)
    with hocket.attach(model, optimizer, {}, engine=Pipeline(stages=num_stages, alpha=alpha)) as session:
        t = 0
        means, distances = [], []
        for number in range(rounds + 2):
            for _ in range(num_stages):
                t += 1
                session.train_batch(batch(t), torch.nn.functional.mse_loss)
            session.settle()
            optimizer.param_groups[0]["lr"] = 0.0  # they have drifted apart: only pulls from now on
            if number == 0:
                continue
            states = [stage.weights.state_dict()["replicas"] for stage in stages_of(session)]
            replicas = [
                torch.cat([x.reshape(-1) for state in states for x in state[i]["parameters"].values()])
                for i in range(num_stages)
            ]
            everything = torch.stack([*replicas, flat(model)])
            mean = everything.mean(0)
            means.append(mean)
            distances.append(float((everything - mean).norm()))
    return means, distances
