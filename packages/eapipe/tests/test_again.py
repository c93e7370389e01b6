"""Models whose pipelines are attached again go on counting steps and passes, and with their periods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from toys import batch, chain, flat, sgd

import hocket
from hocket_eapipe import Pipeline, Policy


# After an error a rank has no more of the model than its own stages.
@pytest.mark.one_of_each
@pytest.mark.parametrize(("ranks", "fails"), [(1, False), (1, True), (3, False)])
@pytest.mark.parametrize("policy", [Policy.FLUSH, Policy.ELASTIC])
def test_a_job_goes_on_saving_where_it_saved(ranks: int, policy: Policy, fails: bool, tmp_path: Path) -> None:
    def body() -> list[int]:
        model = chain(3)
        engine = Pipeline(stages=3, policy=policy)
        counted = []
        try:
            with hocket.attach(model, sgd(model), {}, engine=engine) as session:
                for each in session.data([batch(t) for t in range(3)], same_batches=True):
                    session.train_batch(each, mse_loss)
                session.save(tmp_path)
                if fails:
                    raise KeyError
        except KeyError:
            pass
        with hocket.attach(model, sgd(model), {}, engine=engine) as session:
            counted += [session.step, session.inner.epochs.ended]
            session.train_batch(batch(3), mse_loss)
            session.save(tmp_path)
            counted.append(session.step)
        other = chain(3)
        with hocket.attach(other, sgd(other), {}, engine=engine) as session:
            counted.append(session.step)
        return counted

    assert hocket.virtual(ranks).run(body) == [[3, 1, 4, 0]] * ranks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_periods_go_on() -> None:
    """Two pipelines, averaged after steps 2 and 4 of five, are what one session makes of them."""
    strategy = hocket.compose("periodic_average", "parameters.0.every=2")

    def run(*lengths: int) -> Tensor:
        rank = hocket.join().rank
        model = chain(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        done = 0
        for length in lengths:
            engine = Pipeline(stages=2, pipelines=2, policy=Policy.FLUSH)
            with hocket.attach(model, optimizer, strategy, engine=engine, initial="keep") as session:
                for t in range(done, done + length):
                    session.train_batch(batch(10 * rank + t), mse_loss)
            done += length
        return flat(model)

    again, whole = hocket.virtual(2).run(run, 1, 3, 1), hocket.virtual(2).run(run, 5)
    assert not torch.equal(again[0], again[1])
    for mine, expected in zip(again, whole, strict=True):
        torch.testing.assert_close(mine, expected)
