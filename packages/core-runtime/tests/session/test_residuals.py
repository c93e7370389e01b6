"""Residuals and momentum of compressors, against plain sums and SGD in one process: nothing is lost or counts twice.

Uneven data, steps that are left out, and changes of phase, at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import on_ranks

import hocket
from hocket.errors import NonFiniteError
from hocket.testing.session import inner_of

#: Per rank and step, what is poisoned.
Bad = set[tuple[int, int]]

NUMEL = 8
TOPK = {"name": "topk", "density": 0.25}
FEEDBACK = {"name": "error_feedback", "compressor": TOPK}
CORRECTED = {"name": "momentum_correction", "compressor": FEEDBACK}
DRAWN = {"name": "error_feedback", "compressor": {"name": "shared_random", "density": 0.25}}
KEEPING = (("sparse_allreduce", FEEDBACK), ("allreduce", DRAWN), ("sparse_allreduce", CORRECTED))


def one_exchange(collective: str, compressor: Any, overlap: str = "none", **fields: Any) -> dict[str, Any]:
    exchange = {"collective": collective, "compressor": compressor, "overlap": overlap, "segments": "layers"}
    return {"gradients": [{**exchange, **fields}]}


def everything(density: float = 1.0, **fields: Any) -> dict[str, Any]:
    """Return momentum correction that sends everything, without masking: SGD's own arithmetic."""
    feedback = {"name": "error_feedback", "compressor": {"name": "topk", "density": density}}
    corrected = {"name": "momentum_correction", "masking": False, "compressor": feedback}
    return one_exchange("sparse_allreduce", corrected, **fields)


# ---- sent + residual = contributed ----------------------------------------------------------------------------------


class Sums(nn.Module):
    """A loss whose gradients are the samples themselves, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(NUMEL, 1, bias=False).double() for _ in range(2))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = sum(layer(x[number]).sum() for number, layer in enumerate(self.layers))
        return loss


def samples_of(rank: int, count: int) -> Tensor:
    """Return the samples of a rank, [count, 2, NUMEL]."""
    return torch.randn(count, 2, NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def contributed(counts: Sequence[int], bad: Bad) -> Tensor:
    """Return the sum over steps of the mean over ranks that have a sample; without steps in which one is poisoned."""
    total = torch.zeros(2, NUMEL, dtype=torch.float64)
    for step in range(max(counts)):
        having = [rank for rank, count in enumerate(counts) if step < count]
        if not any((rank, step) in bad for rank in having):
            total += sum(samples_of(rank, counts[rank])[step] for rank in having) / len(having)
    return total


def residuals_of(session: hocket.Session) -> Tensor:
    """Return what this rank keeps back, [2, NUMEL], in the order of the layers."""
    kept = torch.zeros(2, NUMEL, dtype=torch.float64)
    for opened in inner_of(session).phase.opened:
        packing = opened.channel.packing
        for segment in opened.segments:
            state = None if packing is None else packing.states[segment.index]
            if state is not None and state.residual is not None:
                for span in segment.spans:
                    kept[int(span.name.split(".")[1])] += state.residual[span.start : span.stop]
    return kept


def accumulated(
    strategy: Any, counts: Sequence[int], bad: Bad, scaled: bool, fused: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Return what each rank's parameters have got, and what it keeps back."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=scaled)
        on_nonfinite: Literal["skip", "error"] = (
            "skip" if not scaled or "backward" in str(strategy) else "error"
        )
        with hocket.attach(model, optimizer, strategy, on_nonfinite=on_nonfinite) as session:
            for x in session.data(list(samples_of(rank, counts[rank]))):
                optimizer.zero_grad()
                poison = torch.inf if (rank, session.step) in bad else 1.0
                scaler.scale(model(x) * poison).backward()
                scaler.step(optimizer)
                scaler.update()
            kept = residuals_of(session)
            for name, late in inner_of(session).stale.state_dict().items():
                kept[int(name.split(".")[1])] += late[0] / session.size
        return -torch.cat([p.detach() for p in model.parameters()]), kept

    return on_ranks(len(counts), run)


CASES = {
    "counts": st.lists(st.integers(1, 6), min_size=2, max_size=3),
    "bad": st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=4),
    "overlap": st.sampled_from(["none", "backward"]),
}


@given(
    **CASES,
    keeping=st.sampled_from(KEEPING),
    change=st.integers(1, 7),
    scaled=st.booleans(),
    fused=st.booleans(),
)
def test_what_was_applied_and_what_is_kept_are_what_was_contributed(
    counts: list[int],
    bad: Bad,
    overlap: str,
    keeping: tuple[str, Any],
    change: int,
    scaled: bool,
    fused: bool,
) -> None:
    """Whatever the ranks' numbers of batches, with steps left out by the session or by a scaler, and a dense phase."""
    dense = one_exchange("allreduce", "none", overlap)
    strategy = {
        **one_exchange(*keeping, overlap),
        "phases": {change: dense, change + 2: one_exchange(*keeping)},
    }
    ended = accumulated(strategy, counts, bad, scaled, fused)
    applied, total = ended[0][0], sum(kept for _, kept in ended)
    torch.testing.assert_close(applied + total, contributed(counts, bad), rtol=1e-12, atol=1e-12)
    for own, _ in ended:
        assert torch.equal(own, applied)


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize(("collective", "compressor"), KEEPING)
def test_after_a_step_that_was_left_out_all_is_as_if_it_had_not_been(
    collective: str, compressor: Any, overlap: str
) -> None:
    """Bit for bit, also what a huge gradient would have rounded away."""

    def run(rank: int, count: int, factor: float) -> dict[str, Any]:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        strategy = one_exchange(collective, compressor, overlap)
        with hocket.attach(model, optimizer, strategy, on_nonfinite="skip") as session:
            for x in session.data(list(samples_of(rank, 3)[:count])):
                optimizer.zero_grad()
                poison = factor if session.step == 2 else 1.0
                (model(x) * (torch.nan if rank == 0 and poison != 1 else poison)).backward()
                optimizer.step()
            [opened] = inner_of(session).phase.opened
            assert session.skipped_steps == count - 2
            assert opened.channel.packing is not None
            return opened.channel.packing.state_dict()

    before, after = (on_ranks(2, partial(run, count=count, factor=1e30)) for count in (2, 3))
    for expected, own in zip(before, after, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_a_scaler_that_leaves_out_what_was_sent_within_backward_is_told_how_to_keep_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accumulated(one_exchange("sparse_allreduce", FEEDBACK, "backward"), [4, 4], set(), True)
    assert not caplog.records

    def run(rank: int) -> None:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        with hocket.attach(
            model, optimizer, one_exchange("sparse_allreduce", FEEDBACK, "backward")
        ) as session:
            for x in session.data(list(samples_of(rank, 4))):
                optimizer.zero_grad()
                scaler.scale(model(x) * (torch.inf if session.step == 1 else 1)).backward()
                scaler.step(optimizer)
                scaler.update()

    on_ranks(2, run)
    assert "on_nonfinite='skip'" in caplog.text


# ---- momentum correction is SGD with momentum -----------------------------------------------------------------------


class Parts(nn.Module):
    """Three parameters, of which a batch says which are used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((5,), 0.1 * (n + 1), dtype=torch.float64) for n in range(3))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        loss: Tensor = sum((self.parts[number] * x).sum().square() for number in used)
        return loss


def optimizer_of(model: Parts) -> torch.optim.SGD:
    first, second, third = model.parts
    groups = [
        {"params": [first], "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"params": [second], "lr": 0.05, "momentum": 0.5},
        {"params": [third], "lr": 0.01, "weight_decay": 0.2},
    ]
    return torch.optim.SGD(groups, lr=0.1)


def schedule(optimizer: torch.optim.SGD, step: int) -> None:
    """Set what schedulers rewrite: OneCycleLR the learning rate and momentum of every group, down to 0 and up."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.01 * (number + 1) / (step + 1)
        group["momentum"] = (0.9, 0.5, 0.0)[(number + step) % 3]


Step = tuple[tuple[int, ...], float]


def corrected(
    strategy: Any, plan: Sequence[Sequence[Step]], bad: Bad, scheduled: bool
) -> list[tuple[list[Tensor], list[Any]]]:
    """Train on virtual ranks: each batch says which parameters are used, and its weight."""

    def run(rank: int) -> tuple[list[Tensor], list[Any]]:
        model = Parts()
        optimizer = optimizer_of(model)
        data = list(zip(plan[rank], inputs(rank, len(plan[rank])), strict=True))
        with hocket.attach(model, optimizer, strategy, on_nonfinite="skip") as session:
            for (used, _), x in session.data(data, weight=lambda batch: batch[0][1]):
                if scheduled:
                    schedule(optimizer, session.step)
                optimizer.zero_grad()
                loss = model(x, used)
                (loss * torch.nan if (rank, session.step) in bad else loss).backward()
                optimizer.step()
        buffers = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
        return [p.detach().clone() for p in model.parameters()], buffers

    return on_ranks(len(plan), run)


def inputs(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(count)]


def plain(plan: Sequence[Sequence[Step]], bad: Bad, scheduled: bool) -> tuple[list[Tensor], list[Any]]:
    """SGD with the weighted mean of all ranks' gradients: none where no rank has one."""
    model = Parts()
    optimizer = optimizer_of(model)
    for step in range(max(map(len, plan))):
        having = [rank for rank, own in enumerate(plan) if step < len(own) and own[step][1]]
        if any((rank, step) in bad for rank in having):
            continue
        if scheduled:
            schedule(optimizer, step)
        optimizer.zero_grad()
        total = sum(plan[rank][step][1] for rank in having)
        for rank in having:
            used, weight = plan[rank][step]
            (model(inputs(rank, len(plan[rank]))[step], used) * weight / total).backward()
        optimizer.step()
    buffers = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
    return [p.detach().clone() for p in model.parameters()], buffers


STEPS = st.tuples(
    st.sets(st.integers(0, 2), min_size=1).map(lambda used: tuple(sorted(used))),
    st.sampled_from([1.0, 1.0, 0.25, 3.0]),
)


@given(
    plan=st.lists(st.lists(STEPS, min_size=1, max_size=5), min_size=2, max_size=3),
    bad=CASES["bad"],
    overlap=CASES["overlap"],
    segments=st.sampled_from(["model", "{name: bytes, size_mb: 0.00005}"]),
    scheduled=st.booleans(),
)
def test_with_all_sent_it_is_sgd_with_momentum(
    plan: list[list[Step]], bad: Bad, overlap: str, segments: str, scheduled: bool
) -> None:
    """Whoever has batches, of whatever weight, that use whichever parameters; groups with terms of their own."""
    strategy = hocket.compose({"strategy": everything(overlap=overlap)}, f"gradients.0.segments={segments}")
    parameters, buffers = plain(plan, bad, scheduled)
    for own, own_buffers in corrected(strategy, plan, bad, scheduled):
        torch.testing.assert_close(own, parameters, rtol=1e-12, atol=1e-13)
        for buffer, expected in zip(own_buffers, buffers, strict=True):
            torch.testing.assert_close(
                buffer, torch.zeros_like(buffer) if expected is None else expected, rtol=1e-12, atol=1e-13
            )


@pytest.mark.one_of_each
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_scaler_changes_nothing(overlap: str, clip: float | None) -> None:
    """Momentum, weight decay and local clipping are of gradients as they are, whatever the loss is multiplied by."""
    strategy = everything(0.3, overlap=overlap)
    if clip is not None:
        compressor = strategy["gradients"][0]["compressor"]
        clipping = {"name": "local_clipping", "max_norm": clip, "compressor": compressor}
        strategy = one_exchange("sparse_allreduce", clipping)

    def run(rank: int, scaled: bool) -> list[Tensor]:
        model = Parts()
        optimizer = optimizer_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
        with hocket.attach(model, optimizer, strategy) as session:
            for number, x in enumerate(session.data(inputs(rank, 12))):
                with session.accumulate() if number % 3 == 0 else nullcontext():
                    scaler.scale(model(x, (0, 1, 2))).backward()
                if number % 3:
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain, scaled = (on_ranks(2, partial(run, scaled=scaled)) for scaled in (False, True))
    torch.testing.assert_close(scaled, plain, rtol=1e-12, atol=1e-13)


def test_a_closure_within_the_step_is_given_the_terms_too() -> None:
    def run(rank: int, with_closure: bool) -> list[Tensor]:
        model = Parts()
        optimizer = optimizer_of(model)
        with hocket.attach(model, optimizer, everything()) as session:
            for x in session.data(inputs(rank, 5)):

                def closure(x: Tensor = x) -> Tensor:
                    optimizer.zero_grad()
                    loss: Tensor = model(x, (0, 1, 2))
                    loss.backward()
                    return loss

                if with_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    plain, closed = (on_ranks(2, partial(run, with_closure=closes)) for closes in (False, True))
    torch.testing.assert_close(closed, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_several_optimizers_have_terms_of_their_own(overlap: str) -> None:
    """Each over some of the parameters; uneven data."""

    def optimizers_of(model: Parts) -> list[torch.optim.SGD]:
        first, *others = model.parts
        return [
            torch.optim.SGD([first], lr=0.02, momentum=0.9, weight_decay=0.1),
            torch.optim.SGD(others, lr=0.05, momentum=0.5, nesterov=True),
        ]

    def run(rank: int, strategy: Any) -> tuple[list[Tensor], list[Tensor]]:
        model = Parts()
        optimizers = optimizers_of(model)
        with hocket.attach(model, optimizers, strategy) as session:
            for x in session.data(inputs(rank, 5 - 2 * rank)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                model(x, (0, 1, 2)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    assert [o.param_groups[0]["momentum"] for o in optimizers] == [0.9, 0.5]
        states = [optimizer.state[p] for optimizer in optimizers for p in optimizer.param_groups[0]["params"]]
        return [p.detach().clone() for p in model.parameters()], [s["momentum_buffer"] for s in states]

    expected, own = (
        on_ranks(2, partial(run, strategy=strategy)) for strategy in ("sgd", everything(overlap=overlap))
    )
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


def test_a_step_that_a_closure_leaves_out_half_way_takes_nothing_from_residuals() -> None:
    """LBFGS calls the closure several times; NaN comes with the second call of the third step."""

    def run(rank: int, count: int) -> dict[str, Any]:
        model = Sums()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        strategy = one_exchange("sparse_allreduce", FEEDBACK)
        with hocket.attach(model, optimizer, strategy, on_nonfinite="skip") as session:
            for x in session.data(list(samples_of(rank, 3)[:count])):
                calls: list[int] = []

                def closure(x: Tensor = x, calls: list[int] = calls) -> Tensor:
                    optimizer.zero_grad()
                    loss: Tensor = model(x) + sum(p.square().sum() for p in model.parameters())
                    calls.append(1)
                    loss = loss * (torch.nan if session.step == 2 and len(calls) == 2 and rank == 0 else 1.0)
                    loss.backward()
                    return loss

                optimizer.step(closure)
            assert session.skipped_steps == count - 2
            packing = inner_of(session).phase.opened[0].channel.packing
            assert packing is not None
            return packing.state_dict()

    before, after = (on_ranks(2, partial(run, count=count)) for count in (2, 3))
    for expected, own in zip(before, after, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_weights_of_a_rank_whose_data_end_within_an_accumulation() -> None:
    """Weight decay counts by what ranks weigh, not by what their gradients are multiplied by."""

    def run(rank: int, strategy: Any) -> list[Tensor]:
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)
        with hocket.attach(model, optimizer, strategy) as session:
            for number, x in enumerate(session.data(inputs(rank, 5 - 2 * rank))):
                if number % 2 == 0:
                    optimizer.zero_grad()
                    with session.accumulate():
                        (model(x, (0, 1)) / 2).backward()
                else:
                    (model(x, (0, 1)) / 2).backward()
                    optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    expected, own = (on_ranks(2, partial(run, strategy=strategy)) for strategy in ("sgd", everything()))
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.one_of_each
@pytest.mark.parametrize("compressed", ["within", "between"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_change_of_phase_gives_all_groups_what_was_kept_in_any(compressed: str, sharded: bool) -> None:
    """Residuals of groups, or of their leaders, end in the mean over all ranks."""
    over = {"name": "group", "size": 2}
    leaders = {"name": "leaders", "size": 2, "sharded": sharded}
    [sparse], [dense] = (one_exchange(*how)["gradients"] for how in (KEEPING[0], ("allreduce", "none")))
    within, between = (sparse, dense) if compressed == "within" else (dense, sparse)
    gradients = [
        {**within, "over": over},
        {**between, "over": leaders},
        {"collective": "broadcast", "over": {**over, "sharded": sharded}, "segments": "layers"},
    ]
    # Sharded leaders need groups of one size.
    counts = [3, 4, 4, 2] if sharded else [3, 4, 2]
    strategy = {"gradients": gradients, "phases": {3: {"gradients": [dense]}}}
    for applied, _ in accumulated(strategy, counts, set(), False):
        torch.testing.assert_close(applied, contributed(counts, set()), rtol=1e-12, atol=1e-12)


def test_momentum_is_handed_back_as_the_mean_over_groups_of_different_sizes() -> None:
    """The exchange that takes it over is within groups; the optimizers of all ranks get the same buffers."""
    over = {"name": "group", "size": 2}

    def run(rank: int, first: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
        within = {**first["gradients"][0], "over": over}
        between = {"collective": "allreduce", "over": {**over, "name": "leaders"}, "segments": "layers"}
        back = {"collective": "broadcast", "over": over, "segments": "layers"}
        with hocket.attach(model, optimizer, {"gradients": [within, between, back]}) as session:
            for x in session.data(inputs(rank, 5)):
                optimizer.zero_grad()
                model(x, (0, 1, 2)).backward()
                optimizer.step()
        buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        return [p.detach().clone() for p in model.parameters()], buffers

    for own, expected in zip(
        *(
            on_ranks(3, partial(run, first=first))
            for first in (everything(), one_exchange("allreduce", "none"))
        ),
        strict=True,
    ):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


# ---- after an error -------------------------------------------------------------------------------------------------


def fail_in_step(rank: int, session: hocket.Session, model: Parts, optimizer: torch.optim.Optimizer) -> None:
    for number, x in enumerate(inputs(0, 4)):
        optimizer.zero_grad()
        (model(x, (0, 1, 2)) * (torch.nan if number == 3 and rank == 0 else 1)).backward()
        optimizer.step()


def fail_in_loop(rank: int, session: hocket.Session, model: Parts, optimizer: torch.optim.Optimizer) -> None:
    for x in inputs(0, 3):
        optimizer.zero_grad()
        model(x, (0, 1, 2)).backward()
        optimizer.step()
    raise RuntimeError("in the loop")


@pytest.mark.parametrize("fail", [fail_in_step, fail_in_loop])
def test_after_an_error_the_optimizer_has_its_terms_and_buffers_again(fail: Any) -> None:
    """With equal data on all ranks, what one knows of the buffers is what they are."""

    def run(rank: int) -> tuple[list[Any], list[Tensor]]:
        model = Parts()
        optimizer = optimizer_of(model)
        with (
            pytest.raises((NonFiniteError, RuntimeError)),
            hocket.attach(model, optimizer, everything()) as session,
        ):
            fail(rank, session, model, optimizer)
        terms = [{n: g[n] for n in ("momentum", "weight_decay", "lr")} for g in optimizer.param_groups]
        return terms, [optimizer.state[p]["momentum_buffer"] for p in list(model.parameters())[:2]]

    model = Parts()
    optimizer = optimizer_of(model)
    for x in inputs(0, 3):
        optimizer.zero_grad()
        model(x, (0, 1, 2)).backward()
        optimizer.step()
    expected = [optimizer.state[p]["momentum_buffer"] for p in list(model.parameters())[:2]]
    for terms, buffers in on_ranks(2, run):
        assert terms == [
            {n: g[n] for n in ("momentum", "weight_decay", "lr")} for g in optimizer.param_groups
        ]
        torch.testing.assert_close(buffers, expected, rtol=1e-12, atol=1e-13)
