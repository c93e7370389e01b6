"""A damaged newest checkpoint: training goes on from the newest that is whole, and says which it passed over."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import Training, on_ranks

from hocket.errors import CheckpointError

TRAINING = Training(("dpsgd",), epochs=2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with checkpoints of two ranks after steps 2, 3 and 4."""
    on_ranks(2, TRAINING, save=(tmp_path / "checkpoints", [2, 3, 4]), stop=4)
    return tmp_path / "checkpoints"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_last(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def another_step(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 5}))


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("manifest.json", cut, "manifest.json is damaged: JSONDecodeError"),
    ("manifest.json", another_step, "rank-0000.safetensors was saved at step 4, "),
    ("rank-0001.safetensors", cut, "rank-0001.safetensors: expected"),
    ("rank-0001.safetensors", Path.unlink, "it is missing"),
    ("rank-0001.safetensors", flip_last, "rank 1: "),
]


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGES)
def test_the_newest_that_is_whole_is_taken(
    name: str, damage: Callable[[Path], None], told: str, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = on_ranks(2, TRAINING, load=saved / "step-00000003")
    damage(saved / "step-00000004" / name)
    with caplog.at_level(logging.WARNING, "hocket"):
        results = on_ranks(2, TRAINING, load=saved, save=(saved, [4, 5]))
    for result, wanted in zip(results, expected, strict=True):
        assert result.resumed is not None
        assert (result.resumed.step, result.resumed.path) == (3, saved / "step-00000003")
        assert result.losses == wanted.losses
        assert all(torch.equal(result.state[key], wanted.state[key]) for key in wanted.state)
    passed, kept = caplog.messages
    assert passed.startswith(f"{saved / 'step-00000004'} is passed over: ")
    assert told in passed
    assert kept == f"{saved / 'step-00000004'} is damaged, and was renamed to step-00000004.damaged-1"
    assert sorted(path.name for path in saved.iterdir()) == [
        "step-00000002",
        "step-00000003",
        "step-00000004",
        "step-00000004.damaged-1",
        "step-00000005",
    ]


def test_several_are_passed_over_and_other_ranks_notice_it_too(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip_last(saved / "step-00000004" / "rank-0000.safetensors")
    flip_last(saved / "step-00000003" / "rank-0001.safetensors")
    for ranks in (1, 3):
        caplog.clear()
        for result in on_ranks(ranks, Training(("dpsgd",), epochs=1, samples=(8,) * 3), load=saved, stop=3):
            assert result.resumed is not None
            assert result.resumed.step == 2
        assert [message.partition(" is passed over")[0] for message in caplog.messages[:2]] == [
            str(saved / "step-00000004"),
            str(saved / "step-00000003"),
        ]


def test_where_none_is_whole_nothing_begins_in_silence(saved: Path) -> None:
    for path in saved.iterdir():
        cut(path / "manifest.json")
    with pytest.raises(
        CheckpointError, match=r"older ones are not complete \(step-00000003, step-00000002\): restore"
    ):
        on_ranks(2, TRAINING, load=saved)


def test_a_whole_one_of_something_else_is_refused_not_passed_over(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000004: strategy: "):
        on_ranks(2, Training(("local",)), load=saved)
