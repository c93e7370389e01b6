"""Which thread advances an exchange changes no bit."""

from __future__ import annotations

import pytest
import torch
from toys import batches, train

import hocket

GOSSIP = {"collective": "gossip", "topology": "exponential", "segments": "layers"}


def trained(slot: str, **fields: object) -> list[torch.Tensor]:
    strategy = {slot: [{**GOSSIP, **fields}]}
    return hocket.virtual(5).run(lambda: train((strategy,), batches(hocket.join().rank, 6)))


@pytest.mark.parametrize(
    ("slot", "fields"),
    [
        ("gradients", {"overlap": "none"}),
        ("gradients", {"overlap": "backward"}),
        ("parameters", {"overlap": "none"}),
        ("parameters", {"overlap": "forward"}),
        ("parameters", {"delay": 1}),
        ("parameters", {"overlap": "forward", "compressor": {"name": "shared_random", "density": 0.3}}),
    ],
)
def test_both_give_the_same_bits(slot: str, fields: dict[str, object]) -> None:
    inline, threaded = (trained(slot, **fields, progress=progress) for progress in ("inline", "thread"))
    assert len({tuple(flat.tolist()) for flat in inline}) > 1
    for one, other in zip(inline, threaded, strict=True):
        assert torch.equal(one, other)
