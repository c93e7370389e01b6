"""Observers hear of each ended step once, with the session that the user holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from toys import batches, mlp, on_ranks, sgd

import hocket
from hocket.api import hookimpl
from hocket.plugin import default_registry


class Observer:
    def __init__(self) -> None:
        self.seen: list[tuple[object, int]] = []

    @hookimpl
    def hocket_step_end(self, session: object, step: int) -> None:
        self.seen.append((session, step))


@pytest.fixture
def observer() -> Iterator[Observer]:
    own, registry = Observer(), default_registry()
    registry.observe(own)
    yield own
    registry._manager.unregister(own)


def test_an_observer_gets_the_users_session(observer: Observer) -> None:
    def run(rank: int) -> hocket.Session:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "agd") as session:
            for x, y in session.data(batches(rank, 3)):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return session

    sessions = on_ranks(2, run)
    for session in sessions:
        assert [step for seen, step in observer.seen if seen is session] == [0, 1, 2]
    assert len(observer.seen) == 6
