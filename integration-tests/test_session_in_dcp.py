"""A session beside model and optimizer in a checkpoint of torch's own format: each rank goes on to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

import hocket
from hocket.errors import CheckpointError, SessionError
from hocket.testing.session import inner_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STRATEGIES = {
    "sgd": ["sgd"],
    "dpsgd": ["dpsgd"],
    "sgp": ["sgp", "parameters.0.topology=irregular_directed"],
    "overlap_sgp": ["overlap_sgp"],
    "diloco": ["diloco", "parameters.0.every=3"],
    "noloco": ["diloco.noloco", "parameters.0.every=3"],
    "redsync": ["redsync", "gradients.0.compressor={name: redsync.exact, density: 0.2, dense_below_kb: 0}"],
    "powersgd": ["powersgd"],
}
RANKS, SAVED_AT, STEPS = 3, 4, 8


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(6, 5, generator=draw), torch.randint(0, 3, (6,), generator=draw)) for _ in range(STEPS)
    ]


def train(
    name: str,
    *,
    stop: int = STEPS,
    begin: Path | None = None,
    together: bool = False,
    use: Callable[[hocket.Session], Any] = lambda _: None,
) -> Callable[[], Any]:
    """Return a rank's training: from a folder, to a step, with what `use` makes of the session or else its bits."""

    def on_rank() -> Any:
        rank = hocket.join().rank
        torch.manual_seed(rank + (0 if begin is None else 50))
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if begin is not None and not together:
            read(begin, model, optimizer)
        with hocket.attach(model, optimizer, hocket.compose(*STRATEGIES[name])) as session:
            if begin is not None and together:
                read(begin, model, optimizer, session)
            elif begin is not None:
                load({"session": session}, checkpoint_id=begin, no_dist=True)
            for x, y in session.data(batches(rank)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if session.step == stop:  # within the pass
                    return use(session) or bits(model, optimizer)

    return on_rank


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all that a resumed run shares with one that was never interrupted."""
    momenta = [each["momentum_buffer"] for each in optimizer.state.values()]
    return [value.clone() for value in (*model.state_dict().values(), *momenta)]


def read(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, session: Any = None) -> None:
    """Load as a plain script does."""
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    load(state if session is None else {**state, "session": session}, checkpoint_id=folder, no_dist=True)
    if session is None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def parts(session: hocket.Session) -> tuple[Any, Any, Any]:
    """Return what a rank gives to a checkpoint, as copies."""
    assert isinstance(session, Stateful)
    own = session.state_dict()
    optimizer = get_optimizer_state_dict(session.model, session.optimizer)
    with session.consensus():
        model = copy.deepcopy(get_model_state_dict(session.model))
    return model, {**optimizer}, own


def write(folder: Path, ranks: list[tuple[Any, Any, Any]]) -> None:
    """Save as all ranks together do, of which one writes each key."""
    model, optimizer, _ = ranks[0]
    own = {key: value for _, _, of_rank in ranks for key, value in of_rank.items()}
    save({"model": model, "optimizer": optimizer, "session": own}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_rank_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    whole = hocket.virtual(RANKS).run(train(name))
    write(tmp_path, hocket.virtual(RANKS).run(train(name, stop=SAVED_AT, use=parts)))
    resumed = hocket.virtual(RANKS).run(train(name, begin=tmp_path))
    for before, after in zip(whole, resumed, strict=True):
        assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", ["redsync", "diloco"])
def test_one_call_loads_all(name: str, tmp_path: Path) -> None:
    whole = hocket.virtual(RANKS).run(train(name))
    write(tmp_path, hocket.virtual(RANKS).run(train(name, stop=SAVED_AT, use=parts)))
    resumed = hocket.virtual(RANKS).run(train(name, begin=tmp_path, together=True))
    for before, after in zip(whole, resumed, strict=True):
        assert all(map(torch.equal, before, after))


def outer_of(session: hocket.Session) -> Any:
    """Return the outer parameters and their momentum by parameter, and the model."""
    [mix] = inner_of(session).phase.parameters.exchanges
    kept = mix.state_dict()["outer"]
    outer = {f"{name} {kind}": kept[name][kind].clone() for name in kept for kind in ("outer", "momentum")}
    return session.step, {
        **outer,
        **{name: p.detach().clone() for name, p in session.model.named_parameters()},
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_another_number_of_ranks_keeps_what_all_shared(
    ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `session.load` does with files of its own: outer parameters, momentum, steps, and no residual."""
    saved = hocket.virtual(RANKS).run(
        train("diloco", stop=SAVED_AT, use=lambda session: (parts(session), session.save(tmp_path / "own")))
    )
    write(tmp_path / "dcp", [given for given, _ in saved])

    def loaded(read_into: Callable[[hocket.Session], Any]) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        load(state := {"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        model.load_state_dict(state["model"])
        with hocket.attach(model, optimizer, hocket.compose(*STRATEGIES["diloco"])) as session:
            read_into(session)
            with session.consensus():
                return outer_of(session)

    def by_dcp(session: hocket.Session) -> None:
        planner = DefaultLoadPlanner(allow_partial_load=True)
        load({"session": session}, checkpoint_id=tmp_path / "dcp", no_dist=True, planner=planner)

    expected = hocket.virtual(ranks).run(lambda: loaded(lambda session: session.load(tmp_path / "own")))
    caplog.clear()
    for (step, given), (oracle_step, oracle) in zip(
        hocket.virtual(ranks).run(lambda: loaded(by_dcp)), expected, strict=True
    ):
        assert step == oracle_step == SAVED_AT
        assert given.keys() == oracle.keys()
        assert all(torch.equal(given[each], oracle[each]) for each in given)
    [message] = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert f"was saved by {RANKS} ranks, but {ranks} ranks run" in message
    assert "is dropped (replicas that differ)" in message


def test_what_is_dropped_is_named(caplog: pytest.LogCaptureFixture) -> None:
    saved = hocket.virtual(RANKS).run(train("redsync", stop=SAVED_AT, use=hocket.Session.state_dict))

    def loaded() -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with hocket.attach(model, optimizer, hocket.compose(*STRATEGIES["redsync"])) as session:
            session.load_state_dict(saved[session.rank])
            [opened] = inner_of(session).phase.opened
            assert opened.channel.packing is not None
            residuals = [state.residual for state in opened.channel.packing.states.values()]
            assert all(each is None or not each.any() for each in residuals)
            return session.step

    assert hocket.virtual(2).run(loaded) == [SAVED_AT, SAVED_AT]
    [message] = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert (
        "is dropped (gradients.0 ages, gradients.0 floors, gradients.0 momentum, gradients.0 residual)"
        in message
    )


def test_mistakes_are_named() -> None:
    [given] = hocket.virtual(1).run(train("sgd", stop=2, use=hocket.Session.state_dict))

    def loading(state: Any, strategy: str = "sgd") -> Callable[[], None]:
        def on_rank() -> None:
            model = made()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with hocket.attach(model, optimizer, hocket.compose(*STRATEGIES[strategy])) as session:
                session.load_state_dict(state)

        return on_rank

    with pytest.raises(CheckpointError, match="the session's state: all is missing"):
        hocket.virtual(1).run(loading({"model": 1}))
    with pytest.raises(CheckpointError, match=r"strategy: .*this session has"):
        hocket.virtual(1).run(loading(given, "powersgd"))

    def within(session: hocket.Session) -> None:
        with (
            session.consensus(),
            pytest.raises(SessionError, match=r"state_dict on rank 0 after step 2: .*do it after"),
        ):
            session.state_dict()

    hocket.virtual(1).run(train("sgd", stop=2, use=within))
