from __future__ import annotations

import pytest
import torch

from hocket.task import Scaling, TensorSamples


def test_batch_is_its_samples_in_the_order_asked_for() -> None:
    inputs = torch.arange(12).reshape(6, 2)
    samples = TensorSamples(inputs, torch.arange(6) * 10)

    batch_inputs, batch_targets = samples[[4, 0, 4]]

    assert len(samples) == 6
    assert batch_inputs.tolist() == [[8, 9], [0, 1], [8, 9]]
    assert batch_targets.tolist() == [40, 0, 40]
    assert [tensor.tolist() for tensor in samples[4]] == [[8, 9], 40]


@pytest.mark.parametrize("index", [2, [2, 0]])
def test_scaling_gives_float32_and_leaves_what_is_stored(index: int | list[int]) -> None:
    pixels = torch.tensor([[0, 16], [8, 4], [1, 2]], dtype=torch.uint8)
    samples = TensorSamples(pixels.clone(), torch.zeros(3), Scaling(offset=8, divisor=16))

    inputs, _ = samples[index]

    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, (pixels[index].double() - 8).div(16).float())
    assert torch.equal(samples.inputs, pixels)


@pytest.mark.parametrize("index", [3, [0, 3]])
def test_index_out_of_range_raises(index: int | list[int]) -> None:
    with pytest.raises(IndexError):
        TensorSamples(torch.zeros(3), torch.zeros(3))[index]


def test_mismatched_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="3 inputs do not match 2 targets"):
        TensorSamples(torch.zeros(3), torch.zeros(2))


def test_scaling_of_floats_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8 inputs, not torch\.float32"):
        TensorSamples(torch.zeros(3), torch.zeros(3), Scaling(0, 1))
