"""A session knows where it is: what cannot be done there is refused with what to do; a failed attach leaves nothing."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, mlp, on_ranks, sgd

import hocket
from hocket.errors import AttachError, DisagreementError, HocketError, SessionError
from hocket.session.exchange.phase_opener import PhaseOpener
from hocket.session.step import state as step_state
from hocket.session.step.state import MOVES, SessionState, StepState


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
    ((x, y),) = batches(rank, 1)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def gradients(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def test_two_living_sessions_on_one_model() -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        hocket.attach(model, optimizer, "sgd")
        hocket.attach(model[2], torch.optim.SGD(model[2].parameters(), lr=0.1), "dpsgd")

    with pytest.raises(AttachError, match=r"in an earlier session that is still open.*session\.close\(\)"):
        on_ranks(2, run)


def test_a_refusal_of_one_rank_is_told_on_all() -> None:
    def run(rank: int) -> str:
        model = mlp()
        optimizer = sgd(model)
        if rank == 1:
            model[0].weight = nn.Parameter(model.get_parameter("0.weight").expand(7, 5)[:, ::2])
            optimizer = sgd(model)
        with pytest.raises(AttachError) as told:
            hocket.attach(model, optimizer, "sgd")
        return str(told.value)

    first, second = on_ranks(2, run)
    assert second in first
    assert first.startswith("rank 1 cannot attach: parameter 0.weight")


USES: dict[str, Any] = {
    "`with session`": lambda s: s.__enter__(),
    "session.data": lambda s: s.data([]),
    "session.accumulate": lambda s: s.accumulate().__enter__(),
    "session.save": lambda s: s.save("nowhere"),
    "session.load": lambda s: s.load("nowhere"),
    "session.settle": lambda s: s.settle(),
    "session.consensus": lambda s: s.consensus(),
    "session.replica": lambda s: s.replica(),
    "session.consensus_distance": lambda s: s.consensus_distance(),
    "session.gather": lambda s: s.gather(1),
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("what", USES)
@pytest.mark.parametrize("broken", [False, True])
def test_a_closed_or_broken_session_says_so(what: str, broken: bool) -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, "sgd")
        try:
            with session:
                step(model, optimizer, rank)
                if broken:
                    raise KeyError
        except KeyError:
            pass
        why = "an error ended this session" if broken else "this session is closed"
        with pytest.raises(SessionError, match=f"{what}.* on rank {rank} after step 1: {why}.*attach again"):
            USES[what](session)
        session.close()

    on_ranks(2, run)


@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "local"])
def test_a_step_within_consensus_would_be_lost(strategy: str) -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            step(model, optimizer, rank)
            with session.consensus(), pytest.raises(SessionError, match="a step or a load would be lost"):
                step(model, optimizer, rank)
            optimizer.zero_grad()
            step(model, optimizer, rank)
            session.consensus()
            step(model, optimizer, rank)
            assert session.step == 3

    on_ranks(2, run)


def test_a_step_that_a_scaler_skips_within_consensus_is_refused_too() -> None:
    """Its end would leave the mean in place of this rank's own replica."""

    def run(rank: int) -> bool:
        model = mlp()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu")
        with hocket.attach(model, optimizer, "dpsgd") as session:
            step(model, optimizer, rank)
            session.settle()
            own = flat(model).clone()
            ((x, y),) = batches(rank, 1)
            with session.consensus():
                scaler.scale(F.cross_entropy(model(x), y) * torch.inf).backward()
                with pytest.raises(SessionError, match="a step or a load would be lost"):
                    scaler.step(optimizer)
            return torch.equal(flat(model), own)

    assert on_ranks(2, run) == [True, True]


@pytest.mark.parametrize("strategy", ["sgd", "agd", "dpsgd", "sgp", "overlap_sgp"])
def test_attach_again_after_an_error_and_after_a_failed_attach(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = PhaseOpener.parameters
    failed: set[int] = set()

    def fails_once(self: PhaseOpener, *args: Any) -> Any:
        rank = hocket.join().rank
        if rank not in failed:
            failed.add(rank)
            raise KeyError("a plugin's collective")
        return opens(self, *args)

    monkeypatch.setattr(PhaseOpener, "parameters", fails_once)

    def run(rank: int, *, twice: bool) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        if twice:
            with pytest.raises(KeyError):
                hocket.attach(model, optimizer, strategy)
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            with pytest.raises(ZeroDivisionError), hocket.attach(model, optimizer, strategy):
                raise ZeroDivisionError
        with hocket.attach(model, optimizer, strategy) as session:
            for _ in range(3):
                step(model, optimizer, rank)
            session.settle()
        return flat(model)

    twice = on_ranks(2, lambda rank: run(rank, twice=True))
    once = on_ranks(2, lambda rank: run(rank, twice=False))
    assert all(torch.equal(a, b) for a, b in zip(twice, once, strict=True))


def test_outside_of_a_loop_a_step_counts_as_one() -> None:
    """Also on a rank that the loop before had left without data."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            for x, y in session.data(batches(rank, 1 + rank)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            optimizer.zero_grad()
            ((x, y),) = batches(rank + 10, 1)
            F.cross_entropy(model(x), y).backward()
            return gradients(model), flat(model)

    (first, weights), (second, _) = on_ranks(2, run)
    model = mlp()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    for rank in range(2):
        ((x, y),) = batches(rank + 10, 1)
        (F.cross_entropy(model(x), y) / 2).backward()
    assert torch.equal(first, second)
    assert torch.allclose(first, gradients(model), atol=1e-15)


def test_a_load_or_save_within_consensus_is_refused(tmp_path: Any) -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            step(model, optimizer, rank)
            session.save(tmp_path)
            with session.consensus():
                with session.consensus():
                    pass
                with pytest.raises(SessionError, match="a save would write the mean: do it after"):
                    session.save(tmp_path)
                with pytest.raises(SessionError, match=r"load.*do it after"):
                    session.load(tmp_path)
                with pytest.raises(SessionError, match=r"step.*do it after"):
                    step(model, optimizer, rank)

    on_ranks(2, run)


def test_gradients_accumulated_after_others_were_sent_are_exchanged_too() -> None:
    """Before the optimizer uses them: as if all had been added up first."""

    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        sent, added = batches(rank, 2)
        with hocket.attach(model, optimizer, "sgd") as session:
            F.cross_entropy(model(sent[0]), sent[1]).backward()
            with session.accumulate():
                F.cross_entropy(model(added[0]), added[1]).backward()
            optimizer.step()
        return flat(model)

    first, second = on_ranks(2, run)
    model = mlp()
    optimizer = sgd(model)
    for rank in range(2):
        for x, y in batches(rank, 2):
            (F.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()
    assert torch.equal(first, second)
    torch.testing.assert_close(first, flat(model), rtol=1e-12, atol=1e-14)


def test_no_step_after_a_backward_that_failed_while_it_sent() -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, hocket.compose("agd", "gradients.0.segments=layers"))
        before = flat(model)
        ((x, y),) = batches(rank, 1)
        hidden = model[:2](x)
        hidden.register_hook(fail)  # the last layer is sent already, the first is not
        with pytest.raises(ZeroDivisionError):
            F.cross_entropy(model[2](hidden), y).backward()
        with pytest.raises(HocketError, match=r"backward\(\) failed after it had begun to send"):
            optimizer.step()
        assert torch.equal(flat(model), before)
        session.inner.abandon()

    on_ranks(2, run)


FEEDBACK = {"name": "error_feedback", "compressor": {"name": "topk", "density": 0.5}}
GIVEN_UP: dict[str, Any] = {
    "gradients": "agd",
    "residuals": {"gradients": [{"collective": "sparse_allreduce", "compressor": FEEDBACK}]},
    "parameters": {"parameters": [{"collective": "gossip", "topology": "ring", "overlap": "forward"}]},
    "outer parameters": {
        "parameters": [{"collective": "allreduce", "every": 2, "outer": {"name": "sgd", "lr": 0.7}}]
    },
}


@pytest.mark.parametrize("strategy", GIVEN_UP.values(), ids=GIVEN_UP)
def test_a_session_that_is_given_up_goes_with_its_model(strategy: Any) -> None:
    def run(rank: int) -> weakref.ref[Any]:
        model = mlp()
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, strategy)
        for x, y in session.data(batches(rank, 2 + rank)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return weakref.ref(session)

    given_up = on_ranks(2, run)
    gc.collect()
    assert [session() for session in given_up] == [None, None]


def test_a_session_lives_as_long_as_its_optimizer() -> None:
    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        hocket.attach(model, optimizer, "sgd")
        gc.collect()
        step(model, optimizer, rank)
        return flat(model)

    first, second = on_ranks(2, run)
    assert torch.equal(first, second)


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_no_batch_or_accumulation_within_consensus() -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            with session.consensus():
                with pytest.raises(SessionError, match=r"a batch of session\.data.*within.*do it after"):
                    next(iter(session.data(batches(rank, 1))))
                with (
                    pytest.raises(SessionError, match=r"session\.accumulate.*within.*do it after"),
                    session.accumulate(),
                ):
                    pass
            step(model, optimizer, rank)
            assert session.step == 1

    on_ranks(2, run)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "without optimizer.step()" in line]


@pytest.mark.parametrize("strategy", ["sgd", "agd"])
@pytest.mark.parametrize("skipping", [(1,), (0, 1)])
@pytest.mark.parametrize("through_data", [True, False])
def test_gradients_that_no_step_uses(
    strategy: str, skipping: tuple[int, ...], through_data: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank's `continue` between backward and step is told, and noticed where ranks meet; all ranks' is allowed."""

    def run(rank: int) -> float:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            loader = batches(rank, 5)
            for number, (x, y) in enumerate(session.data(loader) if through_data else loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if number in (1, 3) and rank in skipping:
                    continue
                optimizer.step()
            return session.consensus_distance()

    if skipping == (0, 1):
        assert on_ranks(2, run) == [0.0, 0.0]
    else:
        what = "backwards without optimizer.step[(][)]: 0 on rank 0, 2 on rank 1"
        with pytest.raises(DisagreementError, match=what):
            on_ranks(2, run)
    lines = told(caplog)
    assert [line[: line.index(" exchanged")] for line in sorted(lines)] == [
        f"rank {rank}: backward() at step 1" for rank in skipping
    ]


def test_gradients_of_several_backwards_are_used(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "agd") as session:
            for x, y in session.data(batches(rank, 3)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                model(x).square().mean().backward()
                optimizer.step()
                with session.accumulate():
                    F.cross_entropy(model(x), y).backward()

    on_ranks(2, run)
    assert told(caplog) == []


def test_the_readme_shows_the_moves() -> None:
    lines = (Path(step_state.__file__).parents[1] / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| state |"))
    moves, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[start : start + 8])
    shown = {
        move: {
            state: following
            for states, *cells in rows
            for state in states.split(", ")
            if (following := cells[number])
        }
        for number, move in enumerate(moves[1:])
    }
    assert shown == {
        move: {state.name.lower(): following.name.lower() for state, following in row.items()}
        for move, row in MOVES.items()
    }


@pytest.mark.parametrize("state", SessionState)
def test_a_move_leads_where_the_table_says_or_is_refused(state: SessionState) -> None:
    for move, row in MOVES.items():
        session = StepState(lambda: "rank 2 after step 7")
        session.now = state
        if state in row:
            session.move(move)
        else:
            with pytest.raises(
                SessionError, match=r"^the call on rank 2 after step 7: .*(attach again|do it after)"
            ):
                session.move(move, "the call")
        assert session.now is row.get(state, state)
