"""Objects that travel between ranks come back as they were, or are refused by name."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import on_ranks

from hocket.errors import UserError
from hocket.messages import Form, pack, put_together, take_apart, unpack


class Pair(NamedTuple):
    x: Any
    y: Any


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Record:
    x: int


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        return alike and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


VALUES = [
    None, True, 0, -(2**70), 1.5, -0.0, math.inf, math.nan, "text é \ud800", b"\x00\xff", b"",
    [], (), {}, [1], (1,), [True, 1], [1, 1.0], {1: "a", "1": "b", None: (2, 3)}, [None] * 300, [1] * 300,
    (0.5,) * 300, [True] * 300, [1, True] * 200, [np.int64(1)] * 300, [2**70] * 300, [[], [()], {"a": [{}]}],
    Counter("aab"), OrderedDict(b=1, a=[2]), Pair(torch.ones(2), [None, b"x"]), [Pair(1, Pair(2, 3))],
    np.float32(0.1), np.int64(3), np.bool_(True), np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.array(1.5),
    torch.tensor(3), torch.zeros(0, 3), torch.ones(2, 3).bfloat16(), torch.tensor([True, False]),
    torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64).conj(),
    torch.randn(2, 3).t(), torch.randn(4)[::2], torch.ones(3, requires_grad=True),
    {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, (torch.ones(1),) * 2, torch.arange(3).to(torch.uint16),
]  # fmt: skip


# Numbered: what values show of themselves differs between the processes that share tests out.
@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_comes_back_as_it_was(value: Any) -> None:
    assert same(unpack(pack(value)), value)
    form, tensors = take_apart({"value": value})
    assert same(
        put_together(Form.decode(form.encode()), [t.detach().clone() for t in tensors]), {"value": value}
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_any_nesting_comes_back_as_it_was(value: Any) -> None:
    assert same(unpack(pack(value)), value)


Local = namedtuple("Local", "x")
Local.__qualname__ = "Elsewhere"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, {"image": object()}], "1/image is of type object, which ranks cannot send each other"),
        ({"x": UserDict()}, "x is of type UserDict"),
        ([defaultdict(list)], "0 is of type defaultdict"),
        ((Colour.RED,), "0 is of type Colour"),
        (Record(1), "the value is of type Record"),
        ([{1}], "0 is of type set"),
        ([Local(1)], "0 is of type Local"),
        ([torch.Size([1])], "0 is of type Size"),
        ({"x": torch.eye(2).to_sparse()}, "x is a torch.sparse_coo tensor"),
        ({"x": np.array(["a"])}, "x is an array of"),
        ({"x": np.array([1], dtype=">i4")}, "x is an array of"),
        (np.datetime64("2026-01-01"), "the value is of type datetime64"),
        ({(1, object()): 2}, ": a key/1 is of type object"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_anything_else_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pack(value)


def test_what_names_no_named_tuple_is_refused() -> None:
    for name in ("os.system", "builtins.tuple", "missing.Pair"):
        module, kind = name.split(".")
        form = Form(f'{{"named": ["{module}", "{kind}", ["true"]]}}', ())
        with pytest.raises(UserError, match="this rank has not imported the named tuple"):
            put_together(form, [])


def lent(batch: Any) -> list[Any]:
    import hocket

    def body(rank: int) -> Any:
        model = torch.nn.Linear(1, 1)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "local") as session:
            return list(session.data([batch] if rank == 1 else []))

    return on_ranks(3, body)


def test_a_batch_is_lent() -> None:
    batch = {"x": Pair(torch.ones(2), b"1"), "name": ["a", None], "y": np.arange(3)}
    for [got] in lent(batch):
        assert same(got, batch)


def test_a_batch_that_cannot_be_lent_is_refused_by_name_on_all_ranks() -> None:
    with pytest.raises(UserError, match="cannot get a copy of the batch of rank 1: x is of type Record"):
        lent({"x": Record(1)})
