"""The session of a pipeline: schedulers, replicas' buffers, evaluation, checkpoints, memory, and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import bodies
import pytest
import torch
from reference import sequential
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from toys import batch, chain, flat, reference_batches, sgd, stages_of, trained, twins

import hocket
from hocket.api import hookimpl
from hocket.errors import AttachError, CheckpointError, CompositionError, ConfigError
from hocket.plugin import default_registry
from hocket_eapipe import Balance, BatchNormStatistics, Pipeline, Policy
from hocket_eapipe.memory import TensorBytes


@pytest.mark.parametrize("ranks", [1, 3])
def test_values_of_the_users_optimizer_reach_the_stages(ranks: int) -> None:
    """Flush is sequential SGD with each batch's own learning rate, of a scheduler of torch."""

    def body() -> torch.Tensor:
        model = chain(3)
        optimizer = sgd(model, lr=0.4)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with hocket.attach(model, optimizer, {}, engine=Pipeline(stages=3, policy=Policy.FLUSH)) as session:
            for t in range(1, 11):
                session.train_batch(batch(t), mse_loss)
                scheduler.step()
        return flat(model)

    expected = sequential(twins(chain(3)), reference_batches(10), lambda t: 0.4 * 0.9 ** (t - 1), 0.9)
    for found in hocket.virtual(ranks).run(body):
        torch.testing.assert_close(found, flat(expected), rtol=1e-10, atol=1e-12)


def test_groups_keep_their_own_values() -> None:
    """A second group without learning rate stays where it was, on each replica and the master."""

    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)

    def biases(session: hocket.Session) -> list[torch.Tensor]:
        return [p.detach().clone() for n, p in session.model.named_parameters() if n.endswith("bias")]

    [(_, _, found)] = trained(
        Pipeline(stages=3), 12, model=lambda: chain(3), optimizer=two_groups, look=biases
    )
    expected = [p.detach() for name, p in chain(3).named_parameters() if name.endswith("bias")]
    for given, bias in zip(found, expected, strict=True):
        torch.testing.assert_close(given, bias, rtol=1e-14, atol=0)


def test_a_factory_makes_the_optimizers() -> None:
    made: list[int] = []

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made.append(len(groups[0]["params"]))
        return torch.optim.SGD(groups, lr=1.0)

    def body() -> torch.Tensor:
        model = chain(2)
        engine = Pipeline(stages=2)
        with hocket.attach(model, sgd(model), {}, engine=engine, make_optimizer=make) as session:
            for t in range(1, 6):
                session.train_batch(batch(t), mse_loss)
        return flat(model)

    [found] = hocket.virtual(1).run(body)
    # For each stage the master's, which never steps, and those of two replicas.
    assert made == [2] * 6
    assert torch.equal(found, trained(Pipeline(stages=2), 5, model=lambda: chain(2))[0][0])


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)
        )


def normed() -> nn.Sequential:
    torch.manual_seed(2)
    return Normed().double()


def norms(model: nn.Module) -> list[nn.BatchNorm1d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


def running_means(model: nn.Module) -> list[torch.Tensor]:
    return [norm.running_mean for norm in norms(model) if norm.running_mean is not None]


def test_each_replica_has_its_own_statistics_and_the_master_their_average() -> None:
    """With lr 0: each replica's running mean follows its own batches; the master's is pulled like the weights."""
    alpha, count, num_stages = 0.3, 9, 2

    def look(session: hocket.Session) -> list[torch.Tensor]:
        state = stages_of(session)[0].weights.state_dict()["replicas"]
        first = norms(session.model)[0]
        assert first.running_mean is not None
        assert first.num_batches_tracked is not None
        return [each["buffers"]["1.running_mean"].clone() for each in state] + [
            first.running_mean.clone(),
            first.num_batches_tracked.clone(),
        ]

    [(_, _, found)] = trained(
        Pipeline(stages=num_stages, alpha=alpha, cuts=["3"]),
        count,
        model=normed,
        optimizer=lambda model: sgd(model, lr=0.0),
        look=look,
    )
    linear = normed()[0]
    master = torch.zeros(5, dtype=torch.float64)
    replicas = [master.clone() for _ in range(num_stages)]
    for t in range(1, count + 1):
        i = (t - 1) % num_stages
        replicas[i] = 0.9 * replicas[i] + 0.1 * linear(batch(t)[0]).detach().mean(0)
        away = replicas[i] - master
        # The pull comes after the next forwards, which read other replicas.
        replicas[i], master = replicas[i] - alpha * away, master + alpha * away
    for given, expected in zip(found, [*replicas, master], strict=False):
        torch.testing.assert_close(given, expected)
    assert int(found[-1]) == -(-count // num_stages)


@pytest.mark.parametrize("ranks", [1, 2])
def test_reestimated_statistics_are_the_masters_own(ranks: int) -> None:
    """In evaluation the running mean is that of the master's activations over the last batches."""

    def body() -> list[torch.Tensor]:
        model = normed()
        engine = Pipeline(stages=2, buffers=BatchNormStatistics.REESTIMATED, cuts=["3"])
        with hocket.attach(model, sgd(model, lr=0.1), {}, engine=engine) as session:
            for t in range(1, 8):
                session.train_batch(batch(t), mse_loss)
            with session.consensus():
                assert model.training
                whole = copy.deepcopy(model)
        return [*running_means(whole), *estimated(whole)]

    def estimated(model: nn.Sequential) -> list[torch.Tensor]:
        fresh = copy.deepcopy(model)
        for norm in norms(fresh):
            norm.reset_running_stats()
            norm.momentum = None
        with torch.no_grad():
            for t in range(1, 8):
                fresh(batch(t)[0])
        return running_means(fresh)

    for first, second, *expected in hocket.virtual(ranks).run(body):
        torch.testing.assert_close(first, expected[0])
        torch.testing.assert_close(second, expected[1])


@pytest.mark.parametrize("policy", [Policy.STASHING, Policy.ELASTIC])
def test_ranks_give_up_what_others_train_and_have_it_for_evaluation(policy: Policy) -> None:
    def body() -> list[list[int]]:
        model = chain(4)
        sizes = []
        with hocket.attach(model, sgd(model), {}, engine=Pipeline(policy=policy)) as session:
            for _ in range(2):
                for t in range(1, 4):
                    session.train_batch(batch(t), mse_loss)
                sizes.append([p.numel() for p in model.parameters()])
                with session.consensus():
                    sizes.append([p.numel() for p in model.parameters()])
                    with torch.no_grad():
                        found = float(model(batch(1)[0]).sum())
                    assert session.gather(found) == [found] * 2
        sizes.append([p.numel() for p in model.parameters()])
        return sizes

    whole = [25, 5] * 4
    first, second = hocket.virtual(2).run(body)
    assert first == [[25, 5, 25, 5, 0, 0, 0, 0], whole] * 2 + [whole]
    assert second == [[0, 0, 0, 0, 25, 5, 25, 5], whole] * 2 + [whole]


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", Policy)
def test_a_resumed_run_is_the_one_that_went_on(policy: Policy, ranks: int, tmp_path: Path) -> None:
    """Bit for bit: weights, replicas, momentum, scheduler and dropout, from a save in the middle."""

    def session(resume: bool, folder: Path) -> list[str]:
        torch.manual_seed(5)
        model = bodies.Convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        engine = Pipeline(stages=3, policy=policy, balance=Balance.LAYERS)
        with hocket.attach(model, optimizer, {}, engine=engine) as attached:
            if resume:
                assert attached.load(folder, scheduler=scheduler).step == 7
            for t in range(attached.step + 1, 13):
                attached.train_batch(bodies.image_batch(t, 4), cross_entropy)
                scheduler.step()
                if t == 7 and not resume:
                    attached.save(folder, scheduler=scheduler)
        return [bodies.digest(dict(model.state_dict()))]

    folder = tmp_path / "checkpoints"
    expected = hocket.virtual(ranks).run(lambda: session(False, folder))
    assert hocket.virtual(ranks).run(lambda: session(True, folder)) == expected


def test_a_checkpoint_of_other_ranks_or_another_engine_is_refused(tmp_path: Path) -> None:
    def body(load: bool, policy: Policy = Policy.ELASTIC) -> None:
        model = chain(4)
        with hocket.attach(model, sgd(model), {}, engine=Pipeline(stages=4, policy=policy)) as session:
            session.train_batch(batch(1), mse_loss)
            if load:
                session.load(tmp_path)
            else:
                session.save(tmp_path)

    hocket.virtual(2).run(lambda: body(False))
    with pytest.raises(
        CheckpointError, match=r"engine.policy: this session has naive, the checkpoint elastic"
    ):
        hocket.virtual(2).run(lambda: body(True, Policy.NAIVE))
    with pytest.raises(CheckpointError, match=r"saved setting, on 2 ranks instead of 4, or start again"):
        hocket.virtual(4).run(lambda: body(True))


def test_the_state_of_other_ranks_is_refused() -> None:
    def body(states: list[Any] | None) -> Any:
        model = chain(4)
        with hocket.attach(model, sgd(model), {}, engine=Pipeline(stages=4)) as session:
            session.train_batch(batch(1), mse_loss)
            if states is not None:
                session.load_state_dict(states[session.rank % len(states)])
            return session.state_dict()

    states = hocket.virtual(2).run(lambda: body(None))
    with pytest.raises(CheckpointError, match=r"was not saved by 4 ranks, and a pipeline continues only"):
        hocket.virtual(4).run(lambda: body(states))


@pytest.mark.parametrize("policy", Policy)
def test_peak_memory_is_what_was_planned(policy: Policy) -> None:
    """The plan is right within a tenth per stage, for a model whose weights and activations are about as large."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [
            layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU())
        ]
        return nn.Sequential(*layers, nn.Linear(64, 10))

    def big(t: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(t)
        return torch.randn(96, 64, generator=generator), torch.randint(0, 10, (96,), generator=generator)

    engine = Pipeline(stages=4, policy=policy, micro_batches=4 if policy is Policy.FLUSH else 1)

    def body() -> int:
        net = model()
        counter = TensorBytes()
        with counter, hocket.attach(net, sgd(net, lr=0.01), {}, engine=engine) as session:
            gc.collect()  # what attach has left
            counter.peak = counter.held
            for t in range(1, 10):
                session.train_batch(big(t), cross_entropy)
            # Parameters' own storages lie in memory that is counted already.
            peak = counter.peak - sum(p.nbytes for p in net.parameters())
            session.settle()
        return peak

    net = model()
    planned = engine.plan_stages(net, sgd(net), big(1), cross_entropy, 4)
    for stage, peak in zip(planned, hocket.virtual(4).run(body), strict=True):
        assert peak == pytest.approx(stage.peak_bytes, rel=0.1), stage


def test_errors_say_where() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 2:
                raise ArithmeticError("two samples are none")
            return x

    def body() -> None:
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), Failing())
        with hocket.attach(model, sgd(model), {}, engine=Pipeline(stages=3)) as session:
            for t in range(1, 4):
                session.train_batch(batch(t, torch.float32, 4 if t < 3 else 2), mse_loss)

    with pytest.raises(ArithmeticError) as caught:
        hocket.virtual(3).run(body)
    assert "in the forward of batch 3 at stage 3 of 3 (2 to 2), on rank 2" in caught.value.__notes__


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": 0}, "stages must be 1 or more, not 0"),
        ({"alpha": 1.0}, "alpha must be more than 0 and less than 1"),
        ({"micro_batches": 2}, "micro_batches is 2, but only policy flush"),
        ({"policy": "elastc"}, "policy must be one of naive, stashing"),
    ],
)
def test_configurations_that_mean_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        Pipeline(**fields)


def refused(
    engine: Pipeline, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Any = None, ranks: int = 1
) -> str:
    """Return why a session is not opened."""
    with pytest.raises((AttachError, CompositionError)) as caught:
        hocket.virtual(ranks).run(
            lambda: hocket.attach(model, optimizer, {} if strategy is None else strategy, engine=engine)
        )
    return str(caught.value)


def test_what_cannot_be_carried() -> None:
    model = chain(2)
    adam = torch.optim.Adam(model.parameters())
    assert "the optimizer is Adam" in refused(Pipeline(stages=2, policy=Policy.SPECTRAIN), model, adam)
    assert "LBFGS" in refused(Pipeline(stages=2), model, torch.optim.LBFGS(model.parameters()))
    assert "4 ranks" in refused(Pipeline(stages=2), model, sgd(model), ranks=4)
    assert "the model has 3 layers" in refused(Pipeline(stages=4), model, sgd(model))
    tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    tied[1].weight = tied[0].weight
    assert "0.weight belongs to stages 0 and 1" in refused(Pipeline(stages=2), tied, sgd(tied))


def test_a_model_whose_stages_are_elsewhere_is_not_saved_without_them() -> None:
    """After an error in the loop, as within it; whole models are saved, and copies of them later."""

    def save(model: nn.Module) -> bytes:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        torch.save(model, file)
        return file.getvalue()

    def body() -> None:
        model = chain(4)
        expected = (
            r"stage [12] of 2 is on rank [01] of its pipeline and empty here.*from the files of session\.save"
        )
        with pytest.raises(ArithmeticError):  # noqa: SIM117, PT012
            with hocket.attach(
                model, sgd(model), "local", engine=Pipeline(stages=2, policy=Policy.NAIVE)
            ) as session:
                with session.replica():
                    save(model)
                    copied = copy.deepcopy(model)
                with pytest.raises(CheckpointError, match=expected):
                    model.state_dict()
                raise ArithmeticError
        for attempt in (
            model.state_dict,
            lambda: torch.save(model, io.BytesIO()),
            lambda: copy.deepcopy(model),
        ):
            with pytest.raises(CheckpointError, match=expected):
                attempt()
        save(copied)
        closed = chain(4)
        with hocket.attach(closed, sgd(closed), "local", engine=Pipeline(stages=2, policy=Policy.NAIVE)):
            pass
        save(closed)
        assert not any(module._state_dict_pre_hooks for module in closed.modules())

    hocket.virtual(2).run(body)


def test_an_observer_hears_of_a_pipelines_step_once() -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[tuple[object, int]] = []

        @hookimpl
        def hocket_step_end(self, session: object, step: int) -> None:
            self.seen.append((session, step))

    observer, registry = Observer(), default_registry()
    registry.observe(observer)
    try:
        sessions: list[hocket.Session] = []
        trained(Pipeline(stages=3), 4, model=lambda: chain(3), look=sessions.append)
    finally:
        registry._manager.unregister(observer)
    assert observer.seen == [(sessions[0], step) for step in range(4)]
