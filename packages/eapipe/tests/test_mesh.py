"""The holders of stages, for any mesh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket_eapipe.mesh import Mesh


@given(pipelines=st.integers(1, 5), processes=st.integers(1, 6), more=st.integers(0, 20))
def test_every_stage_of_every_pipeline_has_one_holder(pipelines: int, processes: int, more: int) -> None:
    mesh = Mesh(pipelines, processes, processes + more)
    ranks = range(pipelines * processes)
    held = [
        (mesh.pipeline_of(rank), stage) for rank in ranks for stage in mesh.stages_of(mesh.place_of(rank))
    ]
    assert held == [(pipeline, stage) for pipeline in range(pipelines) for stage in range(mesh.stages)]
    counts = [len(mesh.stages_of(place)) for place in range(processes)]
    assert max(counts) - min(counts) <= 1
    for rank in ranks:
        assert rank in mesh.pipeline_ranks(mesh.pipeline_of(rank))
        assert mesh.data_ranks(mesh.place_of(rank))[mesh.pipeline_of(rank)] == rank


def test_what_cannot_be_shared_out() -> None:
    assert Mesh.of(6, 2, None) == Mesh(2, 3, 3)
    with pytest.raises(ValueError, match="5 ranks cannot be divided evenly into 2"):
        Mesh.of(5, 2, None)
    with pytest.raises(ValueError, match="2 stages are too few for 3 ranks"):
        Mesh.of(6, 2, 2)
