"""The account of RedSync's compressors: what was contributed is what was applied and what is remembered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from hocket.testing.account import LOOPS, MOVES, STEPPED_BY, WITH_VELOCITY, Move, check_account

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
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@example(LOOPS["twice"], "nesterov")
@example(LOOPS["dropped"], "plain")
@example(LOOPS["frozen"], "adam")
@example(LOOPS["added to a sum"], "plain")
@example(LOOPS["added and dropped"], "several")
@given(moves=MOVES, optimizer=st.sampled_from(sorted(STEPPED_BY)))
def test_the_account_holds_for_any_loop(name: str, moves: list[Move], optimizer: str) -> None:
    optimizers_of = STEPPED_BY[optimizer]
    if "velocity" in name:
        optimizers_of = WITH_VELOCITY.get(optimizer, WITH_VELOCITY["plain"])
    check_account({"gradients": EXCHANGES[name]}, moves, optimizers_of, of_sums=name == "quantised sums")
