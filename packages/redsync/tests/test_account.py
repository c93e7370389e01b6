"""The account of RedSync's compressors: what was contributed is what was applied and what is remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hocket
from hocket.testing.account import LAYERS, Move, Sums, check_account, for_any_loop, sample

SPARSE = "sparse_allreduce"
SCALABLE = {"name": SPARSE, "algorithm": "scalable"}
POLICY = {"name": "redsync.allreduce", "auto": False}
#: Of a machine on which dense pays for none of these layers, and for all.
ALL_SPARSE, ALL_DENSE = (
    {
        "name": "redsync.allreduce",
        "costs": {
            "gather_latency_s": 0.0,
            "gather_s_per_byte": 1e-9,
            "reduce_latency_s": 0.0,
            "reduce_s_per_byte": 1e-7,
            "add_s_per_element": 0.0,
            "select_s_per_element": select_s,
        },
    }
    for select_s in (0.0, 1.0)
)


def exchange(collective: Any, name: str, *, corrects: bool = False, **fields: Any) -> list[dict[str, Any]]:
    own = {"density": 0.25, "dense_below_kb": 0.0, "correct_momentum": corrects, "masking": False}
    overlap = fields.pop("overlap", "none")
    compressor = {"name": f"redsync.{name}", **own, **fields}
    return [{"collective": collective, "compressor": compressor, "segments": "layers", "overlap": overlap}]


EXCHANGES = {
    "exact": exchange(SPARSE, "exact"),
    "trimmed": exchange(SPARSE, "trimmed", overlap="backward"),
    "threshold": exchange(SCALABLE, "threshold"),
    "sampled": exchange(SPARSE, "sampled"),
    "hybrid, some dense": exchange(SPARSE, "hybrid", methods={"layers.1.*": "dense"}),
    "policy": exchange(POLICY, "hybrid", methods={"layers.1.*": "dense"}, overlap="backward"),
    "all sparse": exchange(ALL_SPARSE, "hybrid"),
    "all dense": exchange(ALL_DENSE, "hybrid"),
    "quantised": exchange(SPARSE, "asq", feedback="error"),
    "quantised sums": exchange(SPARSE, "asq"),
    "velocity": exchange(SPARSE, "hybrid", corrects=True),
    "velocity, scalable": exchange({**POLICY, "algorithm": "scalable"}, "trimmed", corrects=True),
    "velocity, policy": exchange(
        POLICY, "hybrid", corrects=True, methods={"layers.1.*": "dense"}, overlap="backward"
    ),
    "velocity, all dense": exchange(ALL_DENSE, "hybrid", corrects=True),
}


@pytest.mark.parametrize("name", EXCHANGES)
@for_any_loop
def test_the_account_holds_for_any_loop(name: str, moves: list[Move], optimizer: str) -> None:
    check_account(
        {"gradients": EXCHANGES[name]},
        moves,
        optimizer,
        velocity="velocity" in name,
        of_sums=name == "quantised sums",
    )


@pytest.mark.parametrize("method", ["trimmed", "hybrid"])
def test_momentum_is_read_written_and_cleared_in_the_optimizers_state(method: str) -> None:
    """With all sent it is SGD with momentum, whose buffers are the mean of what ranks read."""

    def train(batches: Any, given: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = Sums()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5, weight_decay=0.1)
        read = []
        with hocket.attach(model, optimizer, given):
            for step in range(6):
                if step in (1, 2, 4, 5):
                    read += [optimizer.state[p]["momentum_buffer"].clone() for p in parameters]
                if step == 2:
                    optimizer.state[parameters[1]]["momentum_buffer"].mul_(-2.0)
                if step == 3:
                    optimizer.state.clear()
                sum(model(x, range(LAYERS)) for x in batches(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in parameters], read

    given = {"gradients": exchange(SPARSE, method, corrects=True, density=1.0)}
    ended = hocket.virtual(2).run(lambda: train(lambda step: [sample(step, hocket.join().rank)], given))
    [(values, read)] = hocket.virtual(1).run(
        lambda: train(lambda step: [sample(step, rank) / 2 for rank in range(2)], "sgd")
    )
    for own, _ in ended:
        torch.testing.assert_close(own, values, rtol=1e-12, atol=1e-12)
    means = [torch.stack(of_ranks).mean(0) for of_ranks in zip(*(told for _, told in ended), strict=True)]
    torch.testing.assert_close(means, read, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("collective", [ALL_DENSE, SPARSE], ids=["all dense", "sparse"])
def test_terms_that_a_schedule_rewrites_hold_in_the_next_step(collective: Any) -> None:
    """With all sent it is SGD whose momentum and weight decay change in some steps, in one of two groups."""

    def train(batches: Any, given: Any) -> list[torch.Tensor]:
        model = Sums()
        first, *others = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "weight_decay": 0.3}, {"params": others}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5, weight_decay=0.1)
        with hocket.attach(model, optimizer, given):
            for step in range(8):
                group = optimizer.param_groups[step % 2]
                if step % 3:
                    group["momentum"], group["weight_decay"] = 0.1 * step, 0.05 * (7 - step)
                sum(model(x, range(LAYERS)) for x in batches(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    given = {"gradients": exchange(collective, "hybrid", corrects=True, density=1.0)}
    ended = hocket.virtual(2).run(lambda: train(lambda step: [sample(step, hocket.join().rank)], given))
    [values] = hocket.virtual(1).run(
        lambda: train(lambda step: [sample(step, rank) / 2 for rank in range(2)], "sgd")
    )
    for own in ended:
        torch.testing.assert_close(own, values, rtol=1e-12, atol=1e-12)
