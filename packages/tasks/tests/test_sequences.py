"""Padded batches against lists of lists, and models that see no padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket_tasks.recurrent import CharacterModel, SequenceClassifier
from hocket_tasks.sequences import ClassifiedSequences, NextElements, Sequences

LISTS = st.lists(st.lists(st.integers(1, 100), min_size=2, max_size=9), min_size=1, max_size=12)


def sequences_of(lists: list[list[int]], width: int = 0) -> Sequences:
    values = torch.tensor([element for sequence in lists for element in sequence])
    if width:
        values = values.unsqueeze(1).repeat(1, width).float()
    return Sequences.of_lengths(values, np.array([len(sequence) for sequence in lists]))


@given(LISTS, st.data())
def test_a_batch_is_padded_to_its_longest(lists: list[list[int]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=6))
    longest = max(len(lists[row]) for row in rows)
    expected = [lists[row] + [0] * (longest - len(lists[row])) for row in rows]
    samples = ClassifiedSequences(sequences_of(lists), torch.arange(len(lists)))
    inputs, targets = samples[rows]
    assert inputs.tolist() == expected
    assert targets.tolist() == rows
    assert samples.lengths is not None
    assert samples.lengths.tolist() == [len(sequence) for sequence in lists]
    wide, _ = ClassifiedSequences(sequences_of(lists, width=3), torch.arange(len(lists)))[rows]
    assert wide.tolist() == [[[element] * 3 for element in row] for row in expected]


@given(LISTS, st.data())
def test_targets_are_the_next_elements(lists: list[list[int]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=6))
    inputs, targets = NextElements(sequences_of(lists))[rows]
    assert inputs.shape == targets.shape
    assert inputs.dtype == targets.dtype == torch.int64
    for row, given_, wanted in zip(rows, inputs.tolist(), targets.tolist(), strict=True):
        sequence, places = lists[row], len(lists[row]) - 1
        assert (given_[:places], wanted[:places]) == (sequence[:-1], sequence[1:])
        assert not any(wanted[places:])


def test_a_sample_alone_has_no_axis_for_the_batch() -> None:
    lists = [[1, 2, 3], [4, 5]]
    inputs, target = ClassifiedSequences(sequences_of(lists), torch.tensor([7, 8]))[1]
    assert (inputs.tolist(), target.item()) == ([4, 5], 8)
    assert [part.tolist() for part in NextElements(sequences_of(lists))[0]] == [[1, 2], [2, 3]]


@pytest.mark.parametrize("index", [2, [0, 2], [-1]])
def test_index_out_of_range_raises(index: int | list[int]) -> None:
    with pytest.raises(IndexError):
        NextElements(sequences_of([[1, 2], [3, 4]]))[index]


def test_mismatched_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences do not match 3 targets"):
        ClassifiedSequences(sequences_of([[1, 2], [3, 4]]), torch.zeros(3))


def test_a_classifier_sees_no_padding() -> None:
    """The output for a sequence in a batch is that for it alone, and so are gradients."""
    torch.manual_seed(0)
    model = SequenceClassifier(3, 5, 4)
    samples = ClassifiedSequences(sequences_of([[1, 2, 3, 4], [5, 6], [7]], width=3), torch.zeros(3))
    together = model(samples[[0, 1, 2]][0])
    for row in range(3):
        torch.testing.assert_close(together[row], model(samples[[row]][0])[0])
    assert together.shape == (3, 4)


def test_a_character_model_has_logits_for_each_character() -> None:
    assert CharacterModel(9, 4)(torch.tensor([[1, 2, 8], [3, 0, 0]])).shape == (2, 3, 9)
