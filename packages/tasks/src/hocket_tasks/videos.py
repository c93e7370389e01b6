"""Sequences as long as UCF101's videos: a classification whose steps take different times by themselves.

Source: S. Li, T. Ben-Nun, S. Di Girolamo, D. Alistarh, T. Hoefler, "Taming Unbalanced Training Workloads in
Deep Learning with Partial Collective Operations" (eager-SGD), PPoPP 2020, sections 2.1 and 7.3: 9,537 videos of 29 to
1,776 frames, 187 on average with a standard deviation of 97, whose features an LSTM classifies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hocket.api import Task, TaskData, draws
from hocket_tasks.recurrent import SequenceClassifier
from hocket_tasks.sequences import ClassifiedSequences, Sequences

NUM_CLASSES = 101
_TRAIN, _VALID = 0, 1
_NUM_SCENES = 12

# Frames are odd multiples of a power of two, from noise, plus even ones, from a scene: none is zero, which is padding.
_NOISE_UNIT = 1 / 128


@dataclass(frozen=True)
class Videos(Task):
    """Classification of videos by 101 pairs of scenes: inputs float32 [T, features], targets int64.

    A frame is its scene's pattern, +-`signal` for each feature, behind uniform noise of variance 4/3. The first half of
    a video shows one of 12 scenes, the second another, and the class is the pair in its order: a mean over frames
    cannot tell it. Lengths are the paper's in number, range, mean and standard deviation; their
    distribution, of which the paper shows a histogram, is log-normal here. Of a video every `stride`-th frame is there.

    Attributes:
        train_samples: the number of videos to train with, 1 or more.
        valid_samples: the number of samples held out, 1 or more.
        stride: every `stride`-th frame is kept: 1 for the paper's lengths; with 8 a video has 4 to about 140 frames, 24
            on average.
        features: the number of features of a frame, 1 or more; 2,048 in the paper.
        hidden: units of the LSTM, 1 or more; 2,048 in the paper.
        signal: a multiple of 1/64, more than 0: the smaller, the harder. The default ends at about
            the paper's 70 % accuracy.
    """

    train_samples: int = 9537
    valid_samples: int = 2000
    stride: int = 8
    features: int = 32
    hidden: int = 64
    signal: float = 0.21875

    def __post_init__(self) -> None:
        for name in ("train_samples", "valid_samples", "stride", "features", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        if not 0 < self.signal < math.inf or self.signal * 64 != int(self.signal * 64):
            raise ValueError(f"signal is {self.signal}; allowed: multiples of 1/64, more than 0")

    def data(self, seed: int) -> TaskData:
        return TaskData(
            train=_draw(self, self.train_samples, seed, _TRAIN),
            valid=_draw(self, self.valid_samples, 0, _VALID),
        )

    def model(self) -> nn.Module:
        return SequenceClassifier(self.features, self.hidden, NUM_CLASSES)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(dim=1) == target).sum()}


def video_lengths(num: int, seed: int, split: int = _TRAIN) -> NDArray[np.int64]:
    """Return lengths in frames, int64 [num], log-normal of mean 187 and standard deviation 97, from 29 to 1,776."""
    mean, deviation = 187.0, 97.0
    variance = math.log(1 + (deviation / mean) ** 2)
    normal = draws.normal(num, "video-l", seed, split)
    lengths = np.exp(math.log(mean) - variance / 2 + math.sqrt(variance) * normal)
    return np.clip(np.rint(lengths), 29, 1776).astype(np.int64)


@lru_cache(maxsize=4)  # the virtual ranks of one process share the 30 MB
def _draw(task: Videos, num: int, seed: int, split: int) -> ClassifiedSequences:
    draws.check_seed(seed)
    lengths = -(-video_lengths(num, seed, split) // task.stride)
    if split == _VALID:
        lengths.sort()  # batches of an evaluation have little padding then
    classes = draws.below(np.full(num, NUM_CLASSES), "video-c", seed, split)
    scenes = _scenes(task.features)
    pairs = np.array(
        [(one, other) for one in range(_NUM_SCENES) for other in range(_NUM_SCENES) if one != other]
    )
    starts = np.cumsum(lengths) - lengths
    place = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    is_second = place >= np.repeat((lengths + 1) // 2, lengths)
    scene = pairs[np.repeat(classes, lengths), is_second.astype(np.int64)]
    words = draws.words(-(-len(place) * task.features // 8), "video-x", seed, split)
    levels = words.astype("<u8", copy=False).view(np.uint8)[: len(place) * task.features]
    frames = torch.from_numpy(levels.reshape(-1, task.features)).to(torch.float32)
    frames.mul_(2 * _NOISE_UNIT).sub_(255 * _NOISE_UNIT)
    frames.add_(torch.from_numpy(scenes[scene]), alpha=task.signal)
    return ClassifiedSequences(Sequences.of_lengths(frames, lengths), torch.from_numpy(classes))


def _scenes(num_features: int) -> NDArray[np.float32]:
    """Return each scene's pattern of -1 and 1, the same in every run, float32 [scenes, features]."""
    drawn = draws.words(_NUM_SCENES * num_features, "video-s", 0, 0) >> np.uint64(63)
    return (2 * drawn.astype(np.float32) - 1).reshape(_NUM_SCENES, num_features)
