"""Sessions on a device that stands in for a GPU: the CPU's numbers, and a host that waits for copies' events alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from hocket.launch.launching import launch
from hocket.launch.own_ranks import OwnRanks

if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch knows no device that is written in Python", allow_module_level=True)

RANK = Path(__file__).parent / "standin_rank.py"
EXCHANGING = ["agd", "overlap_sgp", "periodic_average,parameters.0.every=2"]
if os.environ.get("HOCKET_CELLS") == "all":
    EXCHANGING += ["sgd", "dpsgd"]

#: Outer parameters on the device, and in host memory: their steps there wait for copies.
OUTER = ",parameters.0.".join(
    ["periodic_average", "every=2", "outer.name=sgd", "outer.lr=0.7", "outer.momentum=0.9"]
)
OFFLOADED = f"{OUTER},parameters.0.offload=true"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks tell, which train on the device and on the CPU."""
    folder = tmp_path_factory.mktemp("job")
    program = [sys.executable, str(RANK), *EXCHANGING, OUTER, OFFLOADED]
    outputs = [folder / f"{rank}.json" for rank in range(2)]
    assert launch(OwnRanks(), 2, [*program, "--out", str(folder)], folder=folder) == 0
    return [json.loads(output.read_text()) for output in outputs]


@pytest.mark.parametrize("strategy", EXCHANGING)
def test_a_step_does_not_wait_for_the_device(told: list[dict[str, Any]], strategy: str) -> None:
    for rank in told:
        assert rank[strategy]["copied"] > 0  # events have been waited for: what they brought is right
        assert rank[strategy]["right"]
        assert rank[strategy]["waits"] == []


@pytest.mark.parametrize("strategy", [OUTER, OFFLOADED])
def test_outer_parameters_step_alike_on_the_device_and_in_host_memory(
    told: list[dict[str, Any]], strategy: str
) -> None:
    for rank in told:
        assert rank[strategy]["right"]


@pytest.mark.parametrize("strategy", [*EXCHANGING, OUTER])
def test_lanes_on_the_device_carry_the_same_without_a_wait(told: list[dict[str, Any]], strategy: str) -> None:
    for rank in told:
        assert rank[f"{strategy} on lanes there"]["right"]
        assert rank[f"{strategy} on lanes there"]["waits"] == []


def test_a_device_that_waits_for_ever_is_told_of(told: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(told):
        gradients, parameters = of_rank["hung"]
        where = f"rank {rank} waits for other ranks in"
        assert gradients.startswith(
            f"{where} gradients.0[0] (on the device): no end after 1 s; rank {1 - rank} "
        )
        assert parameters.startswith(f"{where} parameters.0[0] (on the device): no end after 1 s; rank ")


def test_lanes_on_the_device_bring_the_news_of_nan(told: list[dict[str, Any]]) -> None:
    for rank in told:
        (found, _, skipped), (expected, _, expected_skips) = rank["skipped on lanes there"]
        assert skipped == expected_skips == 1
        assert found == expected


def test_nan_is_counted_where_it_is_and_all_ranks_leave_the_step_out(told: list[dict[str, Any]]) -> None:
    for rank in told:
        (found, waits, skipped), (expected, _, expected_skips) = rank["skipped"]
        assert (skipped, waits) == (expected_skips, []) == (1, [])
        assert found == expected


def test_parameters_with_nan_are_refused_when_they_have_come_from_there(told: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(told):
        averaged, mixed = of_rank["spoiled"]
        assert f"of rank {rank} is NaN or Inf after step 1, and parameters.0 is about to send it" in averaged
        assert "is NaN or Inf after step 1, and parameters.0 is about to send it" in mixed


def test_virtual_ranks_gossip_on_the_device(told: list[dict[str, Any]]) -> None:
    for rank in told:
        on_device, on_cpu = rank["virtual"]
        assert [found for found, _, _ in on_device] == [found for found, _, _ in on_cpu]


def test_a_captured_step_is_refused(told: list[dict[str, Any]]) -> None:
    for rank in told:
        for said in rank["captured"]:
            assert said.startswith("the step is being captured as a CUDA graph")


def test_a_nested_backward_is_known_on_the_device_s_own_thread(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert "_DummyThread" in rank["threads"]  # one that Python has not started: autograd's own
        reentrant, plain = rank["nested"]
        assert (set(reentrant), set(plain)) == ({True}, {False})
