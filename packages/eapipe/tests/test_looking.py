"""Calls that look at pipelines or save them: they are right, and training goes on from there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from toys import batch, chain, flat, sgd

import hocket
from hocket_eapipe import Pipeline, Policy

STRATEGIES = {
    "local": hocket.compose("local"),
    "whole": hocket.compose("sgd"),
    "average": hocket.compose("periodic_average", "parameters.0.every=2"),
    "gossip": hocket.compose("dpsgd"),
}
POLICIES = (Policy.FLUSH, Policy.STASHING, Policy.ELASTIC)

each_policy = pytest.mark.parametrize(
    "policy",
    [pytest.param(each, marks=pytest.mark.full if each is Policy.STASHING else []) for each in POLICIES],
)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
#: Ranks of two pipelines of two stages.
each_size = pytest.mark.parametrize("ranks", [2, 4])


def attached(strategy: str, policy: Policy) -> hocket.Session:
    model = chain(2)
    engine = Pipeline(stages=2, pipelines=2, policy=policy)
    return hocket.attach(model, sgd(model, lr=0.05), STRATEGIES[strategy], engine=engine)


def train(session: hocket.Session, first: int, last: int) -> None:
    for t in range(first, last):
        session.train_batch(batch(50 * session.data_rank + t), mse_loss)


def whole(session: hocket.Session) -> Tensor:
    with session.replica():
        return flat(session.model)


@pytest.mark.one_of_each
@each_policy
@each_strategy
@each_size
def test_consensus_shows_the_mean_of_the_pipelines_and_gives_each_its_own_back(
    strategy: str, policy: Policy, ranks: int
) -> None:
    def body() -> tuple[Tensor, Tensor, float, list[int]]:
        with attached(strategy, policy) as session:
            train(session, 1, 6)
            own = whole(session)
            distance = session.consensus_distance()
            with session.consensus():
                mean = flat(session.model)
            assert torch.equal(whole(session), own)
            return own, mean, distance, session.gather(session.rank)

    told = hocket.virtual(ranks).run(body)
    one, other = told[0][0], told[-1][0]
    expected = float((one - other).norm()) / 2
    for own, mean, distance, gathered in told:
        assert torch.equal(own, one) or torch.equal(own, other)
        torch.testing.assert_close(mean, (one + other) / 2)
        assert distance == pytest.approx(expected, abs=1e-12)
        assert gathered == list(range(ranks))
    assert expected == 0 if strategy == "whole" else expected > 1e-3 or strategy != "local"


@pytest.mark.one_of_each
@each_strategy
@each_size
@pytest.mark.parametrize("what", ["consensus", "distance", "gather", "save", "settle"])
def test_looking_changes_nothing_where_each_batch_is_flushed(
    strategy: str, ranks: int, what: str, tmp_path: Path
) -> None:
    def look(session: hocket.Session) -> None:
        if what == "consensus":
            with session.consensus():
                pass
        elif what == "distance":
            session.consensus_distance()
        elif what == "gather":
            session.gather(session.rank)
        elif what == "save":
            session.save(tmp_path)
        else:
            session.settle()

    def body(*, looking: bool) -> Tensor:
        with attached(strategy, Policy.FLUSH) as session:
            for t in range(1, 6):
                train(session, t, t + 1)
                if looking:
                    look(session)
            return whole(session)

    looked, plain = (hocket.virtual(ranks).run(partial(body, looking=looking)) for looking in (True, False))
    for one, expected in zip(looked, plain, strict=True):
        assert torch.equal(one, expected)


@pytest.mark.one_of_each
@each_policy
@each_strategy
@each_size
def test_a_resumed_run_goes_on_bit_for_bit(strategy: str, policy: Policy, ranks: int, tmp_path: Path) -> None:
    def begin() -> Tensor:
        with attached(strategy, policy) as session:
            train(session, 1, 4)
            session.save(tmp_path)
            train(session, 4, 8)
            return whole(session)

    def resume() -> Tensor:
        with attached(strategy, policy) as session:
            session.load(tmp_path)
            assert session.step == 3
            train(session, 4, 8)
            return whole(session)

    for one, resumed in zip(hocket.virtual(ranks).run(begin), hocket.virtual(ranks).run(resume), strict=True):
        assert torch.equal(one, resumed)


LATER: dict[str, str | dict[str, Any]] = {
    "gossip later": "overlap_sgp",
    "outer": {"parameters": [{"collective": "allreduce", "every": 2, "outer": {"name": "sgd", "lr": 0.7}}]},
    "outer later": {
        "parameters": [
            {"collective": "allreduce", "every": 2, "delay": 1, "outer": {"name": "sgd", "lr": 0.7}}
        ]
    },
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", LATER)
@each_size
def test_weights_that_are_loaded_are_what_is_read_and_closed(
    strategy: str, policy: Policy, ranks: int
) -> None:
    """Neither batches under way nor exchanges change them, and outer parameters do not take their place."""

    def load(session: hocket.Session) -> None:
        session.model.load_state_dict(
            {
                name: torch.full_like(value, session.data_rank)
                for name, value in session.model.state_dict().items()
            }
        )

    def body() -> None:
        model = chain(2)
        engine = Pipeline(stages=2, pipelines=2, policy=policy)
        session = hocket.attach(model, sgd(model, lr=0.05), hocket.compose(LATER[strategy]), engine=engine)
        train(session, 1, 6)
        if ranks == 2:
            load(session)
        else:  # only then a rank holds all stages
            with session.replica():
                load(session)
        with session.consensus():
            assert (flat(model) == 0.5).all()
        assert (whole(session) == session.data_rank).all()
        session.close()
        assert (flat(model) == session.data_rank).all()

    hocket.virtual(ranks).run(body)


@pytest.mark.one_of_each
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", LATER)
@each_size
def test_a_consensus_right_after_a_resume(strategy: str, policy: Policy, ranks: int, tmp_path: Path) -> None:
    def body(*, resumes: bool) -> Tensor:
        model = chain(2)
        engine = Pipeline(stages=2, pipelines=2, policy=policy)
        with hocket.attach(
            model, sgd(model, lr=0.05), hocket.compose(LATER[strategy]), engine=engine
        ) as session:
            if resumes:
                session.load(tmp_path)
            else:
                train(session, 1, 6)
                session.save(tmp_path)
            with session.consensus():
                return flat(model)

    first, second = (hocket.virtual(ranks).run(partial(body, resumes=resumes)) for resumes in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
