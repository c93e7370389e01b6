"""The contracts of `hocket.outer.api` as tests: outer optimizers, and merges.

Their tests are a subclass with one line:

    class TestSgd(OuterConformance):
        outers = (Sgd(lr=0.7, momentum=0.9, nesterov=True),)
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from hocket.outer.api import Merge, Outer

__all__ = ["MergeConformance", "OuterConformance"]

_NUMEL = 24
_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def _drawn(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(_NUMEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class OuterConformance:
    """The conformance tests of outer optimizers, for subclasses named `Test...` that list them.

    Attributes:
        outers: the outer optimizers to test.
    """

    outers: ClassVar[tuple[Outer, ...]] = ()

    @_DTYPES
    def test_it_steps_in_place_against_the_mean_distance(self, dtype: torch.dtype) -> None:
        """The first step of a small distance moves towards the ranks, and changes nothing but what it is given."""
        for outer in self.outers:
            parameters, gradient, state = (
                _drawn(1, dtype),
                torch.ones(_NUMEL, dtype=dtype) * 1e-3,
                _state(outer, dtype),
            )
            before, address = parameters.clone(), parameters.data_ptr()
            outer.step(parameters, gradient, state, before.clone() if outer.mixes else None)
            assert (parameters < before).all(), "it steps along the distance, and not against it"
            assert parameters.data_ptr() == address
            assert parameters.dtype == dtype
            assert state.keys() == set(outer.remembers)

    @_DTYPES
    def test_equal_ranks_stay_equal_and_pieces_change_no_bit(self, dtype: torch.dtype) -> None:
        """A segment cut in two takes the same steps as a whole one: phases and other ranks cut it otherwise."""
        for outer in self.outers:
            whole, state = _drawn(1, dtype), _state(outer, dtype)
            again, other = whole.clone(), _state(outer, dtype)
            pieces = [slice(0, 8), slice(8, _NUMEL)]
            for round in range(4):
                outer.step(whole, _drawn(10 + round, dtype), state, _mean(outer, round, dtype))
                for piece in pieces:
                    gradient, mean = _drawn(10 + round, dtype)[piece].clone(), _mean(outer, round, dtype)
                    kept = {name: kept[piece] for name, kept in other.items()}
                    outer.step(again[piece], gradient, kept, None if mean is None else mean[piece])
            assert torch.equal(whole, again)
            assert all(torch.equal(state[name], other[name]) for name in state)

    @_DTYPES
    def test_what_it_remembers_is_all_that_it_remembers(self, dtype: torch.dtype) -> None:
        """Another process that is given parameters and state goes on with the same bits."""
        for outer in self.outers:
            parameters, state = _drawn(1, dtype), _state(outer, dtype)
            for round in range(3):
                outer.step(parameters, _drawn(10 + round, dtype), state, _mean(outer, round, dtype))
            moved, carried = parameters.clone(), {name: kept.clone() for name, kept in state.items()}
            outer.step(parameters, _drawn(20, dtype), state, _mean(outer, 20, dtype))
            outer.step(moved, _drawn(20, dtype), carried, _mean(outer, 20, dtype))
            assert torch.equal(parameters, moved)

    def test_padding_stays_zero(self) -> None:
        """Elements that are 0 on all ranks, as the padding behind parameters, are 0 afterwards."""
        for outer in self.outers:
            parameters, state = torch.zeros(_NUMEL), _state(outer, torch.float32)
            outer.step(parameters, torch.zeros(_NUMEL), state, torch.zeros(_NUMEL) if outer.mixes else None)
            assert not parameters.any()


def _state(outer: Outer, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros(_NUMEL, dtype=dtype) for name in outer.remembers}


def _mean(outer: Outer, round: int, dtype: torch.dtype) -> Tensor | None:
    return _drawn(30 + round, dtype) if outer.mixes else None


class MergeConformance:
    """The conformance tests of merges, for subclasses named `Test...` that list them.

    Attributes:
        merges: the merges to test.
    """

    merges: ClassVar[tuple[Merge, ...]] = ()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_what_has_come_is_read_only_and_parameters_stay_where_they_are(self, dtype: torch.dtype) -> None:
        wire = torch.float32 if dtype is torch.bfloat16 else dtype
        for merge in self.merges:
            parameters, come = _drawn(1, dtype), _drawn(2, wire)
            before, address = come.clone(), parameters.data_ptr()
            merge.merge(parameters, come, _drawn(3, wire) if merge.needs_sent else None)
            assert torch.equal(come, before)
            assert (parameters.data_ptr(), parameters.dtype) == (address, dtype)

    def test_what_takes_all_overwrites_parameters_that_have_not_changed(self) -> None:
        for merge in self.merges:
            parameters, come = _drawn(1, torch.float64), _drawn(2, torch.float64)
            merge.merge(parameters, come, _drawn(1, torch.float64) if merge.needs_sent else None)
            assert torch.allclose(parameters, come, rtol=1e-14) == merge.takes_all

    def test_parameters_that_equal_what_has_come_stay(self) -> None:
        for merge in self.merges:
            parameters = _drawn(1, torch.float64)
            merge.merge(
                parameters, _drawn(1, torch.float64), _drawn(1, torch.float64) if merge.needs_sent else None
            )
            torch.testing.assert_close(parameters, _drawn(1, torch.float64), rtol=1e-15, atol=0)
