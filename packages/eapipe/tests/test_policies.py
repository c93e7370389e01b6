"""Each weight policy against its own plain NumPy computation, with momentum, over 50 batches and more."""

from __future__ import annotations

import pytest
import torch
from reference import elastic, newest, sequential
from toys import batch, chain, flat, reference_batches, sgd, stages_of, trained, twins

import hocket
from hocket_eapipe import Pipeline, Policy
from hocket_eapipe.weights import Elastic

LR, MOMENTUM, STEPS = 0.3, 0.9, 50

POLICIES = [Policy.NAIVE, Policy.STASHING, Policy.VERTICAL_SYNC, Policy.SPECTRAIN]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_newest_weights_are_those_of_the_reference(policy: Policy, num_stages: int) -> None:
    model = chain(num_stages)
    expected = newest(policy, twins(model), reference_batches(STEPS), LR, MOMENTUM)
    [(found, _, _)] = trained(
        Pipeline(stages=num_stages, policy=policy), STEPS, model=lambda: chain(num_stages)
    )
    torch.testing.assert_close(found, flat(expected), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("policy", [*POLICIES, Policy.ELASTIC, Policy.FLUSH])
def test_fewer_batches_than_stages(policy: Policy, count: int) -> None:
    model, batches = chain(4), reference_batches(count)
    if policy is Policy.ELASTIC:
        expected, _ = elastic(twins(model), batches, 4, 0.3, 1, LR, MOMENTUM)
    elif policy is Policy.FLUSH:
        expected = sequential(twins(model), batches, lambda t: LR, MOMENTUM)
    else:
        expected = newest(policy, twins(model), batches, LR, MOMENTUM)
    for ranks in (1, 4):
        for found, _, _ in trained(
            Pipeline(stages=4, policy=policy), count, ranks=ranks, model=lambda: chain(4)
        ):
            torch.testing.assert_close(found, flat(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tau", [1, 2, 3])
@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_elastic_is_round_robin_elastic_averaging(num_stages: int, alpha: float, tau: int) -> None:
    engine = Pipeline(stages=num_stages, policy=Policy.ELASTIC, alpha=alpha, tau=tau)
    expected, replicas = elastic(
        twins(chain(num_stages)), reference_batches(STEPS), num_stages, alpha, tau, LR, MOMENTUM
    )
    [(found, _, state)] = trained(engine, STEPS, model=lambda: chain(num_stages), look=replicas_of)
    torch.testing.assert_close(found, flat(expected), rtol=1e-9, atol=1e-11)
    for number, replica in enumerate(replicas):
        torch.testing.assert_close(state[number], flat(replica), rtol=1e-9, atol=1e-11)
    assert not torch.allclose(state[0], found, atol=1e-3), "replicas that are the master would hide a mistake"


def replicas_of(session: hocket.Session) -> list[torch.Tensor]:
    """Return each replica's weights over all stages of this rank."""
    states = [stage.weights.state_dict()["replicas"] for stage in stages_of(session)]
    return [
        torch.cat([t.double().reshape(-1) for state in states for t in state[number]["parameters"].values()])
        for number in range(len(states[0]))
    ]


@pytest.mark.parametrize("policy", [*POLICIES, Policy.ELASTIC])
def test_float32_agrees_to_its_rounding(policy: Policy) -> None:
    def single() -> torch.nn.Sequential:
        return chain(3, torch.float32)

    # A learning rate at which rounding errors do not grow.
    batches, lr = reference_batches(STEPS), 0.05
    if policy is Policy.ELASTIC:
        expected, _ = elastic(twins(single()), batches, 3, 0.3, 1, lr, MOMENTUM)
    else:
        expected = newest(policy, twins(single()), batches, lr, MOMENTUM)
    [(found, _, _)] = trained(
        Pipeline(stages=3, policy=policy),
        STEPS,
        model=single,
        optimizer=lambda model: sgd(model, lr),
        batches=lambda t: batch(t, torch.float32),
    )
    torch.testing.assert_close(found, flat(expected), rtol=2e-5, atol=2e-6)


def test_policies_are_told_apart() -> None:
    """With one linear layer per stage and two stages naive and stashing are the same numbers; not with three."""
    found = {
        policy: trained(Pipeline(stages=3, policy=policy), 20, model=lambda: chain(3))[0][0]
        for policy in [*POLICIES, Policy.ELASTIC, Policy.FLUSH]
    }
    names = list(found)
    for place, name in enumerate(names):
        for other in names[place + 1 :]:
            assert not torch.allclose(found[name], found[other], rtol=1e-4), f"{name} and {other}"
    two = [
        trained(Pipeline(stages=2, policy=p), 20, model=lambda: chain(2))[0][0]
        for p in (Policy.NAIVE, Policy.STASHING)
    ]
    assert torch.equal(*two)


def plain(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[float]]:
    """Train in one process, without Hocket."""
    model = chain(4, dtype)
    optimizer = sgd(model)
    losses = []
    for t in range(1, count + 1):
        inputs, target = batch(t, dtype)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return flat(model), losses


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_flush_is_sequential_sgd(ranks: int) -> None:
    """Bit for bit with one micro-batch; to rounding with several, which add up in another order."""
    expected, losses = plain(STEPS, torch.float32)
    results = trained(
        Pipeline(stages=4, policy=Policy.FLUSH),
        STEPS,
        ranks=ranks,
        model=lambda: chain(4, torch.float32),
        batches=lambda t: batch(t, torch.float32),
    )
    for found, _, _ in results:
        assert torch.equal(found, expected)
    assert results[-1][1] == losses
    expected, losses = plain(STEPS, torch.float64)
    for micro_batches in (2, 4, 5):  # of 6 samples
        engine = Pipeline(stages=4, policy=Policy.FLUSH, micro_batches=micro_batches)
        results = trained(engine, STEPS, ranks=ranks, model=lambda: chain(4))
        for found, _, _ in results:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        assert results[-1][1] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("policy", [*POLICIES, Policy.ELASTIC, Policy.FLUSH])
def test_one_stage_is_plain_sgd(policy: Policy) -> None:
    """But for elastic, whose one replica is pulled: there with lr 0 on both nothing moves."""
    engine = Pipeline(stages=1, policy=policy)
    [(found, losses, _)] = trained(
        engine, 20, model=lambda: chain(4, torch.float32), batches=lambda t: batch(t, torch.float32)
    )
    expected, expected_losses = plain(20, torch.float32)
    assert torch.equal(found, expected) == (policy is not Policy.ELASTIC)
    assert losses[0] == expected_losses[0]


def test_a_drain_in_between_is_a_pipeline_that_begins_anew() -> None:
    """And any number of ranks agrees on what that means."""

    def body() -> torch.Tensor:
        model = chain(3)
        with hocket.attach(
            model, sgd(model), {}, engine=Pipeline(stages=3, policy=Policy.VERTICAL_SYNC)
        ) as session:
            for t in range(1, 8):
                session.train_batch(batch(t), torch.nn.functional.mse_loss)
            with session.consensus():
                middle = flat(model)
            for t in range(8, 12):
                session.train_batch(batch(t), torch.nn.functional.mse_loss)
        return torch.stack([middle, flat(model)])

    [found] = hocket.virtual(1).run(body)
    expected = newest("vertical_sync", twins(chain(3)), reference_batches(7), LR, MOMENTUM)
    torch.testing.assert_close(found[0], flat(expected), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(found, other) for other in hocket.virtual(3).run(body))


def test_elastic_keeps_optimizer_state_lazily() -> None:
    """A replica that has had no batch has no momentum buffer."""

    def count(session: hocket.Session) -> list[int]:
        weights = stages_of(session)[0].weights
        assert isinstance(weights, Elastic)
        return [len(each["optimizer"]["state"]) for each in weights.state_dict()["replicas"]]

    [(_, _, counts)] = trained(Pipeline(stages=4), 2, model=lambda: chain(4), look=count)
    assert counts == [2, 2, 0, 0]
