"""A traced peer keeps the contract of a transport, and what a progress thread sends is traced as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schema import load

import hocket
from hocket.progress import Execution, InlineProgress, ProgressEngine, ThreadProgress
from hocket.schedule import ring_allreduce
from hocket.testing.transport import TransportConformance

ROUNDS, RANKS, COUNT = 5, 3, 6


class TestTraced(TransportConformance):
    sizes = (pytest.param(1, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full))

    @pytest.fixture(autouse=True)
    def _use_folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "trace.json"

    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        def traced() -> Any:
            trace = hocket.Trace(self.path)
            try:
                return body(trace.join(hocket.join()), *args)
            finally:
                trace.abandon()

        return hocket.virtual(size).run(traced)


@pytest.mark.parametrize("engine", [InlineProgress, ThreadProgress])
def test_a_schedule_is_traced_message_by_message(engine: type[ProgressEngine], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def body() -> None:
        trace = hocket.Trace(path)
        peer = trace.join(hocket.join())
        progress, data = engine(), np.ones(COUNT)
        run = Execution(ring_allreduce(peer.rank, peer.size, data), peer, progress, "ring")
        for round in range(ROUNDS):
            data[:] = 1.0
            run.start(round).wait()
            assert data.tolist() == [RANKS] * COUNT
        progress.close()
        trace.close()

    hocket.virtual(RANKS).run(body)
    trace = load(path, RANKS)
    # Two times around the ring, less one stop each.
    assert len(trace.arrows) == ROUNDS * RANKS * 2 * (RANKS - 1)
    assert trace.other["unjoined_messages"] == 0
