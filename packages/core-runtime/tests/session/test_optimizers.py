"""Several optimizers on one model, optimizers within optimizers, and steps that a GradScaler leaves out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import Batch, batches, flat, mlp, on_ranks

import hocket
from hocket.errors import AttachError, DisagreementError, ReplacedError

FORWARD = ("dpsgd", "parameters.0.overlap=forward")
PARAMETER_STRATEGIES = (
    ("dpsgd",),
    FORWARD,
    ("sgp",),
    ("overlap_sgp",),
    ("periodic_average", "parameters.0.every=2"),
)
STRATEGIES = (("sgd",), ("agd", "gradients.0.segments=layers"), *PARAMETER_STRATEGIES)


def together(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer with two groups."""
    first, _, second = model.children()
    groups = [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.05}]
    return [torch.optim.SGD(groups, lr=0.1, momentum=0.9)]


def apart(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The same as two optimizers."""
    first, _, second = model.children()
    return [
        torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9),
    ]


def trained(
    strategy: tuple[str, ...],
    make: Callable[[nn.Module], list[torch.optim.Optimizer]],
    data: list[Batch],
    *,
    bad: int | None = None,
) -> Tensor:
    model = mlp()
    optimizers = make(model)
    with hocket.attach(model, optimizers, hocket.compose(*strategy), on_nonfinite="skip") as session:
        for number, (x, y) in enumerate(session.data(data)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss * torch.nan if number == bad and session.rank == 0 else loss).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert session.step == len(data)
        assert session.skipped_steps == (bad is not None)
        session.settle()
        return flat(model)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=" ".join)
def test_two_optimizers_are_one(strategy: tuple[str, ...]) -> None:
    one = on_ranks(3, lambda rank: trained(strategy, together, batches(rank, 5)))
    two = on_ranks(3, lambda rank: trained(strategy, apart, batches(rank, 5)))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_nan_in_one_optimizers_part_is_skipped_by_both() -> None:
    one = on_ranks(2, lambda rank: trained(("sgd",), together, batches(rank, 5), bad=2))
    two = on_ranks(2, lambda rank: trained(("sgd",), apart, batches(rank, 5), bad=2))
    assert all(torch.isfinite(values).all() for values in two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_an_optimizer_that_steps_every_second_time() -> None:
    def run(rank: int) -> tuple[int, Tensor]:
        model = mlp()
        first, second = apart(model)
        with hocket.attach(model, [first, second], "dpsgd") as session:
            for number, (x, y) in enumerate(batches(rank, 6)):
                first.zero_grad(), second.zero_grad()
                F.cross_entropy(model(x), y).backward()
                first.step()
                if number % 2:
                    second.step()
            session.consensus()
            return session.step, flat(model)

    told = on_ranks(2, run)
    assert [step for step, _ in told] == [6, 6]
    assert torch.equal(told[0][1], told[1][1])


def test_an_optimizer_that_is_not_attached_is_named() -> None:
    def run(rank: int) -> None:
        model = mlp()
        first, second = apart(model)
        with hocket.attach(model, first, "sgd"):
            ((x, y),) = batches(rank, 1)
            F.cross_entropy(model(x), y).backward()
            first.step()
            second.step()

    with pytest.raises(
        AttachError, match=r"SGD\) that is not attached steps 2 .* hocket\.attach\(model, \[first, second\], "
    ):
        on_ranks(2, run)


def test_optimizers_of_other_models_step_as_they_like() -> None:
    def run(rank: int) -> None:
        model, other = mlp(), mlp(1)
        optimizers = apart(model)
        with hocket.attach(model, optimizers, "dpsgd"):
            (theirs,) = together(other)
            F.cross_entropy(other(batches(rank, 1)[0][0]), batches(rank, 1)[0][1]).backward()
            theirs.step()

    on_ranks(2, run)


class SAM(torch.optim.Optimizer):
    """As github.com/davda54/sam: climbs, and comes back by `p.data = ...`."""

    def __init__(
        self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **kwargs: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"])

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # as SAM's
        assert closure is not None
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


def sam_trained(strategy: tuple[str, ...] | None, data: list[Batch], *, closure: bool) -> Tensor:
    model = mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def gradients(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def loop(data: Any) -> None:
        for x, y in data:
            gradients(x, y)
            if closure:
                optimizer.step(partial(gradients, x, y))
            else:
                optimizer.first_step()
                gradients(x, y)
                optimizer.second_step()

    if strategy is None:
        loop(data)
        return flat(model)
    with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
        loop(session.data(data))
        assert session.step == len(data)
        session.settle()
        with session.consensus():
            mean = flat(model)
        told = torch.tensor(session.gather(flat(model).tolist()), dtype=torch.float64)
        assert torch.allclose(told.mean(0), mean, rtol=0, atol=1e-14)
        return flat(model)


def test_sam_with_a_closure_is_sam_on_the_whole_batch() -> None:
    data = [batches(rank, 4) for rank in range(2)]
    whole = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(*data, strict=True)]
    expected = sam_trained(None, whole, closure=True)

    def of_rank(strategy: tuple[str, ...], rank: int) -> Tensor:
        return sam_trained(strategy, data[rank], closure=True)

    for strategy in STRATEGIES[:2]:
        for values in on_ranks(2, partial(of_rank, strategy)):
            assert torch.allclose(values, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize(
    "strategy", [("dpsgd",), FORWARD, ("periodic_average", "parameters.0.every=2")], ids=" ".join
)
def test_sam_with_exchanged_parameters(strategy: tuple[str, ...], closure: bool) -> None:
    # Two ranks mix to their mean: what one process makes of two replicas that it averages.
    models = [mlp() for _ in range(2)]
    optimizers = [SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9) for model in models]
    data = [batches(rank, 4) for rank in range(2)]
    for step in range(4):
        for model, optimizer, own in zip(models, optimizers, data, strict=True):
            for act in (optimizer.first_step, optimizer.second_step):
                optimizer.zero_grad()
                F.cross_entropy(model(own[step][0]), own[step][1]).backward()
                act()
        if strategy[0] == "dpsgd" or step % 2:
            with torch.no_grad():
                for p, q in zip(*(model.parameters() for model in models), strict=True):
                    p.copy_((p + q) / 2)
                    q.copy_(p)
    told = on_ranks(2, lambda rank: sam_trained(strategy, data[rank], closure=closure))
    for values, model in zip(told, models, strict=True):
        assert torch.allclose(values, flat(model), rtol=0, atol=1e-14)


@pytest.mark.one_of_each
@pytest.mark.parametrize("strategy", PARAMETER_STRATEGIES, ids=" ".join)
@pytest.mark.parametrize("several", [False, True])
def test_a_scaler_that_skips_on_one_rank_only(strategy: tuple[str, ...], several: bool) -> None:
    """Without `session.data`, too: the other ranks wait for nobody."""

    def run(rank: int) -> tuple[int, Tensor]:
        model = mlp(0, torch.float32)
        optimizers = (apart if several else together)(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with hocket.attach(model, optimizers, hocket.compose(*strategy)) as session:
            for number, (x, y) in enumerate(batches(rank, 6, dtype=torch.float32)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                scaler.scale(loss * torch.inf if rank == 0 and number in (1, 5) else loss).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            session.settle()
            with session.consensus():
                return session.step, flat(model)

    told = on_ranks(3, run)
    assert {step for step, _ in told} == {6}
    assert all(torch.isfinite(values).all() and torch.equal(values, told[0][1]) for _, values in told)


def test_groups_that_come_later_are_named() -> None:
    def run(rank: int) -> None:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "sgd"):
            optimizer.add_param_group({"params": model[1].parameters()})
            model(torch.ones(1, 5)).sum().backward()

    with pytest.raises(ReplacedError, match="group 1 of the optimizer's parameters changed after attach"):
        on_ranks(2, run)


def test_rates_that_differ_between_ranks_are_named() -> None:
    def run(rank: int) -> None:
        model = mlp()
        hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)), "sgd")

    with pytest.raises(DisagreementError, match=r"group 0\.lr: 0\.1 on rank 0, 0\.2 on rank 1"):
        on_ranks(2, run)


def test_rates_that_drift_apart_are_named_at_consensus() -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "sgd") as session:
            optimizer.param_groups[0]["lr"] *= 1 + rank  # ReduceLROnPlateau, by a loss of one's own
            session.consensus()

    with pytest.raises(DisagreementError, match=r"lr: 0\.1 on rank 0, 0\.2 on rank 1"):
        on_ranks(2, run)


def test_rates_that_differed_on_the_way_are_named_at_the_end() -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "sgd"):
            for rate in (
                0.1 * (1 + rank),
                0.0,
            ):  # cosines to 0, over as many steps as each believes that there are
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
                optimizer.step()

    with pytest.raises(
        DisagreementError, match=r"rates of all steps, summed: 0\.1 on rank 0, 0\.2 on rank 1"
    ):
        on_ranks(2, run)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_attach_gives_all_ranks_what_the_first_optimizer_remembers(make: Any) -> None:
    def run(rank: int) -> tuple[bool, Tensor]:
        model = mlp()
        settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), lr=0.1, **settings)
        for strategy in ("dpsgd", "sgd"):
            with hocket.attach(model, optimizer, strategy) as session:
                for x, y in session.data(batches(rank, 3)):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
        return session.inner.replicas_equal, flat(model)

    (equal, first), (_, second) = on_ranks(2, run)
    assert equal
    assert torch.equal(first, second)


def test_a_checkpoint_holds_all_optimizers(tmp_path: Any) -> None:
    def run(rank: int, *, resume: bool) -> Tensor:
        model = mlp()
        optimizers = apart(model)
        data = batches(rank, 6)
        with hocket.attach(model, optimizers, "sgd") as session:
            if resume:
                session.load(tmp_path)
            for number, (x, y) in enumerate(session.data(data)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for optimizer in optimizers:
                    optimizer.step()
                if number == 2 and not resume:
                    session.save(tmp_path)
            return flat(model)

    straight = on_ranks(2, lambda rank: run(rank, resume=False))
    resumed = on_ranks(2, lambda rank: run(rank, resume=True))
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


class KeepingSAM(torch.optim.SGD):
    """A SAM that keeps the parameters' own tensor, and comes back to it."""

    @torch.no_grad()
    def climb(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["kept"] = p.data
            p.data = p.data + 0.05 * p.grad

    def descend(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p].pop("kept")
        self.step()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=" ".join)
def test_a_sam_that_keeps_the_tensor_itself(strategy: tuple[str, ...]) -> None:
    def run(rank: int, *, keeps: bool) -> Tensor:
        model = mlp()
        optimizer = KeepingSAM(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            for x, y in session.data(batches(rank, 4)):
                for act in (optimizer.climb, optimizer.descend):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    act()
                    if not keeps and act == optimizer.climb:  # what comes back is a copy
                        for state in optimizer.state.values():
                            state["kept"] = state["kept"].clone()
            session.settle()
        return flat(model)

    kept = on_ranks(2, lambda rank: run(rank, keeps=True))
    copied = on_ranks(2, lambda rank: run(rank, keeps=False))
    assert all(torch.equal(a, b) for a, b in zip(kept, copied, strict=True))


@pytest.mark.parametrize("strategy", ["sgd", "agd"])
def test_scalers_that_differ_between_ranks_and_batches_left_out(strategy: str) -> None:
    def run(rank: int, *, scaled: bool) -> tuple[int, Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * (1 + 15 * rank), enabled=scaled)
        with hocket.attach(model, optimizer, strategy) as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 5))):
                optimizer.zero_grad()
                if number == 2 and rank == 0:
                    continue
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            return session.step, flat(model)

    for (steps, values), (_, expected) in zip(
        on_ranks(2, lambda rank: run(rank, scaled=True)),
        on_ranks(2, lambda rank: run(rank, scaled=False)),
        strict=True,
    ):
        assert steps == 5
        assert torch.allclose(values, expected, rtol=0, atol=1e-14)


def test_two_optimizers_and_a_scaler_on_a_rank_that_is_out_of_data() -> None:
    def run(rank: int) -> Tensor:
        model = mlp(0, torch.float32)
        optimizers = apart(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with hocket.attach(model, optimizers, "local") as session:
            for x, y in session.data(batches(rank, 2 + 2 * rank, dtype=torch.float32)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                before = flat(model)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                assert torch.equal(before, flat(model)) == (session.weight == 0)
            return flat(model)

    on_ranks(2, run)
