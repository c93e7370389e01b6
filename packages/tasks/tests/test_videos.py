"""Videos: the paper's lengths, samples that are the same wherever they are read, a class that only order tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import samples_of

from hocket.task import ShardSampler
from hocket_tasks.sequences import ClassifiedSequences
from hocket_tasks.videos import NUM_CLASSES, Videos, video_lengths

SMALL = Videos(train_samples=300, valid_samples=100)


def test_lengths_have_the_papers_moments() -> None:
    """9,537 videos; mean 187 and standard deviation 97 to within 5 deviations of what is estimated."""
    lengths = video_lengths(9537, seed=0)
    assert lengths.mean() == pytest.approx(187, abs=5 * 97 / 9537**0.5)
    assert lengths.std() == pytest.approx(97, rel=0.1)
    assert 29 <= lengths.min() < 40
    assert 700 < lengths.max() <= 1776
    assert np.median(lengths) < lengths.mean()


def test_defaults_are_the_papers_videos_every_eighth_frame() -> None:
    train, valid = samples_of(ClassifiedSequences, Videos())
    assert (len(train), len(valid)) == (9537, 2000)
    np.testing.assert_array_equal(train.lengths, -(-video_lengths(9537, seed=0) // 8))
    inputs, targets = train[[0, 1, 2]]
    assert inputs.shape == (3, train.lengths[:3].max(), 32)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert Videos().model()(inputs).shape == (3, NUM_CLASSES)
    assert len(torch.unique(train[range(9537)][1])) == NUM_CLASSES


def test_no_frame_is_padding() -> None:
    data = Videos(train_samples=300, features=1, signal=0.015625).data(seed=0)
    for row in range(300):
        assert (data.train[row][0] != 0).all()


def test_a_frame_is_noise_around_its_scene() -> None:
    """Videos of a class have the same two scenes, and the class with the two exchanged has them in the other order."""
    data = Videos(train_samples=4000, signal=0.5).data(seed=0).train
    scenes: dict[int, list[list[torch.Tensor]]] = {}
    for row in range(4000):
        frames, target = data[row]
        half = (len(frames) + 1) // 2
        first, second = scenes.setdefault(int(target), [[], []])
        first.append(frames[:half])
        second.append(frames[half:])
    patterns = {}
    for name, halves in scenes.items():
        means = [torch.cat(half).mean(dim=0) for half in halves]
        for mean in means:
            assert (mean.abs() - 0.5).abs().max() < 5 * (4 / 3 / 200) ** 0.5
        patterns[name] = tuple(str(mean.sign().tolist()) for mean in means)
    assert len(set(patterns.values())) == NUM_CLASSES
    assert len({pattern for pair in patterns.values() for pattern in pair}) == 12
    exchanged = sum(pair[::-1] in patterns.values() for pair in patterns.values())
    assert exchanged > NUM_CLASSES / 2


def test_held_out_videos_are_the_same_in_every_run_and_no_training_videos() -> None:
    one, other = SMALL.data(seed=0), SMALL.data(seed=1)
    for split in (0, 50, 99):
        assert torch.equal(one.valid[split][0], other.valid[split][0])
    first = {str(samples[row][0][0].tolist()) for samples in (one.train, other.train) for row in range(300)}
    assert len(first | {str(one.valid[row][0][0].tolist()) for row in range(100)}) == 300 + 300 + 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stride": 0}, "stride is 0; allowed: 1 or more"),
        ({"hidden": -1}, "hidden is -1; allowed: 1 or more"),
        ({"signal": 0.0}, r"signal is 0\.0; allowed: multiples of 1/64, more than 0"),
        ({"signal": 0.1}, r"signal is 0\.1; allowed: multiples of 1/64"),
        ({"signal": float("nan")}, "signal is nan; allowed: multiples of 1/64"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Videos(**fields)


def test_padding_is_little_and_lengths_differ_between_ranks() -> None:
    """With the paper's lengths: 5 % of a batch is padding where random batches have 45 %; steps are unbalanced."""
    lengths = video_lengths(9537, seed=0)

    def longest(sampler: ShardSampler) -> np.ndarray:
        return np.array([lengths[batch].max() for batch in list(sampler)[:74]])

    bucketed = np.stack(
        [longest(ShardSampler(9537, 16, rank, 8, seed=0, lengths=lengths)) for rank in range(8)]
    )
    mixed = np.stack([longest(ShardSampler(9537, 16, rank, 8, seed=0)) for rank in range(8)])
    assert lengths.mean() / bucketed.mean() > 0.95
    assert lengths.mean() / mixed.mean() < 0.55
    # Who waits for the slowest of 8 ranks waits longer than it computes.
    assert bucketed.max(axis=0).mean() > 1.7 * bucketed.mean()


def test_a_run_learns_and_its_ranks_wait_for_each_other(
    hocket_command: Callable[..., None], tmp_path: Path
) -> None:
    """Far better than guessing, and with a step's time told by its batch, a third of the time is waiting."""
    hocket_command(
        *("run", "sgd", "task=videos", "-n", "4", "--transport", "virtual", "batch_size=16", "epochs=5"),
        *("task.train_samples=2000", "task.valid_samples=300", "task.signal=0.5"),
        *("optimizer={name: adam, lr: 0.01}", "compute.element_s=1e-6", "--out", str(tmp_path)),
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["valid_accuracy"] > 0.5
    assert summary["exposed_wait_fraction"] > 0.25
