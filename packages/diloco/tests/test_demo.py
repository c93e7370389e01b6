"""DeMo against the loop of its paper in NumPy, whose transform is written as a sum, and its parts by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import hocket
from hocket.compressor import CompressorTraits, ErrorFeedback, Identity, MomentumCorrection
from hocket.errors import CompositionError
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment
from hocket.testing.compressor import CompressorConformance, dense, run_round
from hocket_diloco.chunk_topk import ChunkTopK
from hocket_diloco.dct import Dct

TILE, K, DECAY, LR, STEPS = 4, 3, 0.9, 0.01, 12
#: With the sides of their tiles.
SHAPES = {"matrix": (8, 12), "vector": (20,), "kernel": (6, 2, 3), "prime": (7, 5)}
SIDES = {"matrix": (4, 4), "vector": (1, 4), "kernel": (3, 3), "prime": (1, 1)}

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Answering(Identity):
    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=True, answers=True)


class TestDct(CompressorConformance):
    compressors = (
        Dct(ChunkTopK(16, 3), tile=4),
        Dct(ChunkTopK(k=3, tile=4), tile=4),
        Dct(ErrorFeedback(ChunkTopK(64, 5), decay=1.0)),
    )
    rounding = 1e-5
    sizes = (0, 7, 1000)


def coefficients(block: Values) -> Values:
    """Return the orthonormal DCT-II of a block [rows, columns], term by term."""
    rows, columns = block.shape
    found = np.zeros_like(block)
    for k in range(rows):
        for m in range(columns):
            for i in range(rows):
                for j in range(columns):
                    angle = np.cos(np.pi * k * (2 * i + 1) / (2 * rows)) * np.cos(
                        np.pi * m * (2 * j + 1) / (2 * columns)
                    )
                    found[k, m] += block[i, j] * angle
            found[k, m] *= np.sqrt((1 + (k > 0)) / rows) * np.sqrt((1 + (m > 0)) / columns)
    return found


def matrix_of(name: str) -> Values:
    """Return what makes coefficients, tile after tile, of a parameter's values: [n, n], orthogonal."""
    shape, (rows, columns) = SHAPES[name], SIDES[name]
    height = shape[0] if len(shape) > 1 else 1
    numel = int(np.prod(shape))
    made = []
    for at in range(numel):
        values = np.zeros(numel)
        values[at] = 1
        whole = values.reshape(height, -1)
        made.append(
            np.concatenate(
                [
                    coefficients(whole[top : top + rows, left : left + columns]).ravel()
                    for top in range(0, height, rows)
                    for left in range(0, whole.shape[1], columns)
                ]
            )
        )
    return np.stack(made, axis=1)


MATRICES = {name: matrix_of(name) for name in SHAPES}


def largest_of_tiles(spectrum: Values, numel: int, k: int) -> NDArray[np.intp]:
    """Return the places of the k largest of each tile of so many coefficients, or of all where it has fewer."""
    by_tile = np.argsort(-np.abs(spectrum.reshape(-1, numel)), axis=1, kind="stable")[:, :k]
    return (by_tile + np.arange(0, spectrum.size, numel)[:, None]).ravel()


def target(rank: int, step: int, numel: int) -> Values:
    found: Values = np.sin(np.arange(numel) * (0.3 + rank) + 0.5 * step + rank)
    return found


def expected(ranks: int) -> dict[str, Values]:
    """Return the parameters after all steps, as the paper's algorithm has them."""
    theta = {name: np.linspace(-1, 1, int(np.prod(shape))) for name, shape in SHAPES.items()}
    momentum = {name: np.zeros((ranks, values.size)) for name, values in theta.items()}
    for step in range(STEPS):
        for name, values in list(theta.items()):
            sums, counts = np.zeros(values.size), np.zeros(values.size)
            for rank in range(ranks):
                own = momentum[name][rank]
                own *= DECAY
                own += LR * (values - target(rank, step, values.size))
                spectrum = MATRICES[name] @ own
                kept = np.zeros_like(spectrum)
                chosen = largest_of_tiles(spectrum, int(np.prod(SIDES[name])), K)
                kept[chosen] = spectrum[chosen]
                own -= MATRICES[name].T @ kept
                sums += kept
                counts[chosen] += 1
            step_of_all = MATRICES[name].T @ (sums / np.maximum(counts, 1))
            # Of what is 0 but for rounding the sign is nobody's.
            theta[name] = values - LR * np.where(np.abs(step_of_all) > 1e-10, np.sign(step_of_all), 0)
    return theta


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            values = torch.linspace(-1, 1, int(np.prod(shape)), dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(values.reshape(shape)))


def train(*overrides: str) -> dict[str, Values]:
    model = Shapes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.0, 0.0), eps=1e-12, weight_decay=0.0)
    strategy = hocket.compose(
        "diloco.demo",
        f"gradients.0.compressor={{tile: {TILE}}}",
        f"gradients.0.compressor.compressor={{decay: {DECAY}}}",
        f"gradients.0.compressor.compressor.compressor={{tile: {TILE}, k: {K}}}",
        *overrides,
    )
    with hocket.attach(model, optimizer, strategy) as session:
        for step in range(STEPS):
            for parameter in model.parameters():
                values = parameter.detach().numpy().reshape(-1)
                own = values - target(session.rank, step, values.size)
                parameter.grad = torch.from_numpy(own).reshape(parameter.shape)
            optimizer.step()
        assert session.inner.replicas_equal
    return {name: p.detach().numpy().reshape(-1) for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_demo_is_that_of_the_paper(ranks: int) -> None:
    wanted = expected(ranks)
    for given in hocket.virtual(ranks).run(train):
        for name in SHAPES:
            np.testing.assert_allclose(given[name], wanted[name], rtol=0, atol=1e-5)


def test_each_tile_sends_its_own_largest() -> None:
    """A tile whose coefficients are small sends as many as one beside it whose are large."""
    kernel = nn.Parameter(torch.zeros(8, 6))
    spans = partition(named_spans([("kernel", kernel), ("bias", nn.Parameter(torch.zeros(10)))]), Model())[0]
    numel = spans[-1].start + spans[-1].padded_numel
    segment = Segment("segment", 0, spans, torch.zeros(numel), torch.zeros(numel))
    # Tiles of 4 x 3, four of them, and of 1 x 2, five of them.
    segment.outgoing[: spans[0].numel] = torch.arange(1.0, 49).view(8, 6).mul(0.01).pow(3).flatten()
    segment.outgoing[spans[1].start : spans[1].stop] = 1.0
    compressor = ChunkTopK(k=3, tile=4)
    chunks = compressor.chunks(segment)
    assert chunks.runs.lengths.tolist() == [12] * 4 + [2] * 5
    assert chunks.counts.tolist() == [3] * 4 + [2] * 5
    sent = dense(compressor, run_round(compressor, segment, compressor.init(segment), 0))
    assert [int((sent[12 * tile : 12 * tile + 12] != 0).sum()) for tile in range(4)] == [3] * 4


def test_with_the_mean_over_ranks_the_signs_are_others() -> None:
    """Negative control: an element that one of three ranks has sent would count a third."""
    one = hocket.virtual(3).run(train)[0]
    other = hocket.virtual(3).run(lambda: train("gradients.0.collective.mean=ranks"))[0]
    assert any(not np.allclose(one[name], other[name]) for name in SHAPES)


def test_all_coefficients_are_all_values() -> None:
    """Also of a kernel whose memory is not in the order of its indices."""
    kernel = nn.Parameter(torch.zeros(8, 4, 3, 3).to(memory_format=torch.channels_last))
    spans = partition(named_spans([("kernel", kernel), ("bias", nn.Parameter(torch.zeros(7)))]), Model())[0]
    flats = [torch.zeros(spans[-1].start + spans[-1].padded_numel) for _ in range(2)]
    segment = Segment("segment", 0, spans, *flats)
    for span in spans:
        segment.outgoing[span.start : span.stop].normal_()
    everything = Dct(ChunkTopK(64, 64), tile=8)
    arrived = dense(everything, run_round(everything, segment, everything.init(segment), 0))
    torch.testing.assert_close(arrived, segment.outgoing, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: ErrorFeedback(Dct(ChunkTopK())), "put error_feedback inside"),
        (lambda: MomentumCorrection(Dct(ChunkTopK())), "put momentum_correction inside"),
        (lambda: Dct(ChunkTopK(), tile=0), "tile must be 1 or more"),
        (lambda: Dct(Answering()), "use it without dct"),
        (
            lambda: Dct(ErrorFeedback(ChunkTopK(tile=32))),
            "tile is 64, but the compressor inside has tile 32",
        ),
        (lambda: ChunkTopK(tile=65), "tile must be 0 to 64"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        make()


@pytest.mark.parametrize("collective", ["{name: gossip, topology: complete}", "allreduce"])
def test_coefficients_are_gathered(collective: str) -> None:
    gossip = "gossip" in collective
    given = {
        "collective": "gossip" if gossip else "allreduce",
        **({"topology": "complete"} if gossip else {}),
        "compressor": {"name": "diloco.dct", "compressor": {"name": "shared_random", "density": 0.5}},
    }
    with pytest.raises(CompositionError, match="use sparse_allreduce"):
        hocket.compose({"gradients": [given]})
