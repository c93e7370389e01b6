"""The account of partial collectives: what ranks contribute is applied or waits for a later round, and counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hocket
from hocket.testing.account import LAYERS, Move, Sums, check_account, for_any_loop, sample
from hocket.testing.session import inner_of

FULL = {"name": "eager.partial_allreduce", "candidates": None, "starts": "last"}
#: Ranks are handed all rounds, so that they apply the same.
SOLO = {"name": "eager.partial_allreduce", "candidates": None, "missed": "sum"}


def exchange(collective: dict[str, Any], overlap: str = "none") -> list[dict[str, Any]]:
    return [{"collective": collective, "segments": "layers", "overlap": overlap}]


EXCHANGES = {
    "full": exchange(FULL),
    "solo": exchange(SOLO),
    "solo within backward": exchange(SOLO, "backward"),
    "solo by messages": exchange({**SOLO, "shared": False}),
    "majority": exchange({**SOLO, "candidates": 1}),
    "bounded": exchange({**SOLO, "staleness": 1}),
}


@pytest.mark.parametrize("name", EXCHANGES)
@for_any_loop
def test_the_account_holds_for_any_loop(name: str, moves: list[Move], optimizer: str) -> None:
    check_account({"gradients": EXCHANGES[name]}, moves, optimizer, size=3, pace_s=0.01)


@pytest.mark.parametrize("name", ["solo", "majority"])
def test_the_next_phase_gets_what_is_carried(name: str) -> None:
    """The last step of the phase drops a layer's gradients, with which others' late parts have come."""
    phases = {2: {"gradients": [{"collective": "allreduce", "segments": "layers"}]}}
    moves: list[Move] = [
        ("backward", (0, 1, 2), 1),
        ("step", (), 0),
        ("backward", (0, 1, 2), 2),
        ("freeze", (0,), 0),
        ("step", (), 0),
        ("thaw", (0,), 0),
    ]
    check_account({"gradients": EXCHANGES[name], "phases": phases}, moves, "plain", size=3, pace_s=0.01)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_checkpoint_holds_what_is_carried(is_loaded: bool, tmp_path: Path) -> None:
    """Gradients are dropped before it, of which one rank's come late."""
    strategy = {"gradients": EXCHANGES["solo"]}

    def begin() -> float:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with hocket.attach(model, optimizer, strategy) as session:
            session.peer.clock.sleep(0.01 * session.rank)
            for number in (1, 2):
                model(sample(number, session.rank), range(LAYERS)).backward()
                if number == 1:
                    optimizer.step()
                optimizer.zero_grad()
            session.save(tmp_path)
            account = inner_of(session).phase.account
            assert account is not None
            carried = account.state_dict()["carried"]["layers.0.weight"].abs().max().item()
            if not is_loaded:
                end(session, model, optimizer)
        return carried

    def end(session: hocket.Session, model: Sums, optimizer: torch.optim.Optimizer) -> None:
        lane = session.peer.lane("all have come")
        for number in (3, 4):
            lane.ibarrier().wait()
            optimizer.zero_grad()
            model(sample(number, session.rank), range(LAYERS)).backward()
            optimizer.step()
        lane.ibarrier().wait()
        kept = torch.zeros(LAYERS, sample(0, 0).shape[1], dtype=torch.float64)
        [opened] = inner_of(session).phase.opened
        for segment in opened.segments:
            own = opened.channel.take_stale(segment)
            assert own is not None
            for span in segment.spans:
                kept[int(span.name.split(".")[1])] += own[span.start : span.stop]
        lane.ibarrier().wait()
        lane.close()
        ended.append((-torch.cat([p.detach() for p in model.parameters()]), kept))

    def go_on() -> None:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with hocket.attach(model, optimizer, strategy) as session:
            session.load(tmp_path)
            end(session, model, optimizer)

    ended: list[tuple[Tensor, Tensor]] = []
    assert max(hocket.virtual(2).run(begin)) > 0.1
    if is_loaded:
        hocket.virtual(2).run(go_on)
    assert len(ended) == 2
    found = sum(applied / 2 + kept for applied, kept in ended)
    expected = sum(sample(number, rank) / 2 for number in (1, 3, 4) for rank in range(2))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
