"""A rank's file is read as it was written: values, types, order, bits; and nothing is pickled."""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hocket.checkpoint.files import StateFile, write_state
from hocket.checkpoint.means import mean_of_section, why_no_mean
from hocket.errors import CheckpointError

#: Of each test of drawn states.
EXAMPLES = 100 if os.environ.get("HOCKET_CELLS") == "all" else 25

_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits, of any shape and order of axes, 0 elements included."""
    dtype = draw(st.sampled_from(_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**32))
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    value = raw.to(torch.uint8)
    tensor = (value[..., 0] > 127) if dtype is torch.bool else value.view(dtype)[..., 0]
    return tensor.clone().permute(draw(st.permutations(range(len(shape)))))


_KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()))
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    tensors(),
    st.integers(0, 4).map(lambda n: np.arange(n, dtype=np.uint32)),
    st.dictionaries(st.integers(), st.integers(), max_size=2).map(Counter),
    st.sampled_from(
        [torch.bfloat16, torch.device("cpu"), b"", b"\xff\x00", {1, "a"}, deque([1.5, "b"], 3), deque()]
    ),
)
_STATES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


def described(tensor: Tensor) -> tuple[Any, ...]:
    """Return dtype, shape, and the order of the axes that have one."""
    strides = [s for s, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
    return tensor.dtype, tensor.shape, strides if tensor.numel() else []


def bits(tensor: Tensor) -> list[int]:
    if tensor.dtype is torch.bool:
        return [int(bit) for bit in tensor.reshape(-1)]
    given: list[int] = tensor.flatten().clone().view(torch.uint8).tolist() if tensor.numel() else []
    return given


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911 (one for each kind)
    """Return whether two states are of the same types, in the same order, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return described(one) == described(other) and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def through_a_file(state: Any, folder: Path) -> Any:
    write_state(folder / "rank-0000.safetensors", {"state": state})
    with StateFile(folder / "rank-0000.safetensors") as file:
        return file.read("state")


@settings(max_examples=EXAMPLES)
@given(state=_STATES)
def test_any_state(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    assert same(through_a_file(state, tmp_path_factory.getbasetemp()), state)


@st.composite
def long_lists(draw: st.DrawFn) -> Any:
    """Long lists of one kind of number, but perhaps for one, as lists or tuples, in and beside other values."""
    kind = draw(
        st.sampled_from([st.booleans(), st.integers(), st.floats(), st.integers(0, 2**64 - 1).map(np.uint64)])
    )
    some = draw(st.lists(kind, min_size=1, max_size=4)) * draw(st.sampled_from([1, 255, 256, 1000]))
    if draw(st.booleans()):
        some[draw(st.integers(0, len(some) - 1))] = draw(_LEAVES)
    return draw(st.sampled_from([list, tuple]))(some)


@settings(max_examples=EXAMPLES)
@given(state=st.dictionaries(_KEYS, st.one_of(long_lists(), st.lists(long_lists(), max_size=2)), max_size=3))
def test_long_lists(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    assert same(through_a_file(state, tmp_path_factory.getbasetemp()), pythonic(state))


_ODD_TEXT = st.text(st.characters(exclude_categories=()), max_size=4)
_ODD = st.one_of(
    _LEAVES, long_lists(), _ODD_TEXT, st.complex_numbers(), st.binary(), st.sets(st.integers(), min_size=1)
)


@settings(max_examples=EXAMPLES)
@given(
    state=st.recursive(
        _ODD, lambda inner: st.one_of(st.lists(inner), st.dictionaries(_ODD_TEXT, inner)), max_leaves=8
    ),
    depth=st.sampled_from([0, 10, 1000]),
)
def test_it_comes_back_or_is_not_written(
    tmp_path_factory: pytest.TempPathFactory, state: Any, depth: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "rank-0000.safetensors"
    path.unlink(missing_ok=True)
    for _ in range(depth):
        state = [state]
    try:
        loaded = through_a_file(state, path.parent)
    except CheckpointError:
        assert not path.exists()
    else:
        assert same(loaded, pythonic(state))


def test_several_ranks_lists_have_no_mean(tmp_path: Path) -> None:
    """Long ones are the first rank's, as short ones are: they are no tensors to whoever has saved them."""
    with contextlib.ExitStack() as stack:
        files = []
        for rank in range(2):
            write_state(
                tmp_path / f"{rank}",
                {"state": {"list": [float(rank)] * 300, "tensor": torch.tensor(float(rank))}},
            )
            files.append(stack.enter_context(StateFile(tmp_path / f"{rank}")))
        assert mean_of_section(files, "state") == {"list": [0.0] * 300, "tensor": torch.tensor(0.5)}


def test_the_order_of_keys_keeps_nobody_from_a_mean(tmp_path: Path) -> None:
    """An optimizer's state is in the order in which parameters had their first gradients."""
    states: list[dict[str, Any]] = [
        {"state": {0: {"a": torch.ones(2)}, 1: {}}},
        {"state": {1: {}, 0: {"a": torch.zeros(2)}}},
    ]
    with contextlib.ExitStack() as stack:
        files = []
        for rank, state in enumerate(states):
            write_state(tmp_path / f"{rank}", state)
            files.append(stack.enter_context(StateFile(tmp_path / f"{rank}")))
        assert not why_no_mean(files, "state")
        assert torch.equal(mean_of_section(files, "state")[0]["a"], torch.full((2,), 0.5))


def pythonic(state: Any) -> Any:
    """Return a state with Python's numbers in place of NumPy's."""
    if type(state) is dict:
        return {key: pythonic(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(pythonic, state))
    return state.item() if isinstance(state, np.generic) else state


@pytest.mark.parametrize("value", [7, 7.25, True, np.int64(7), np.float32(7.25)])
def test_long_lists_take_no_room_in_the_header(value: Any, tmp_path: Path) -> None:
    size = write_state(tmp_path / "file", {"state": [value] * 100_000}).size
    assert size < 801_000


@pytest.mark.parametrize(
    ("digits", "expected"),
    [
        (
            100_000_000,
            r"^state/b makes up most of 100\d{6} bytes of text, but a file holds at most 100000000 bytes besides",
        ),
        (
            5000,
            r"^the checkpoint cannot be saved: a value in its state cannot be written as JSON \(Exceeds the limit",
        ),
    ],
)
def test_what_could_not_be_read_is_not_written(digits: int, expected: str, tmp_path: Path) -> None:
    value = 10**digits if digits < 10_000 else "1" * digits
    with pytest.raises(CheckpointError, match=expected):
        write_state(tmp_path / "file", {"state": {"a": "x" * 1000, "b": value}})
    assert not list(tmp_path.iterdir())


def test_what_has_no_end_is_not_written(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(
        CheckpointError, match=r"a value in its state cannot be written as JSON \(maximum recursion"
    ):
        write_state(tmp_path / "file", {"state": endless})


def test_keys_that_are_no_unicode(tmp_path: Path) -> None:
    state = {"a\udcff": torch.tensor(1), "a\\udcff": torch.tensor(2), "\x00": "\ud800"}
    assert same(through_a_file(state, tmp_path), state)


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    """The library reads what this package writes, views of one buffer and aligned data included."""
    flat = torch.arange(12.0)
    state = {
        "odd": torch.tensor([True]),
        "a": flat[:5],
        "b": flat[5:11].view(2, 3).t(),
        "double": flat.double(),
    }
    size = write_state(tmp_path / "file", {"state": state}).size
    assert size == (tmp_path / "file").stat().st_size
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == {f"state/{name}" for name in state}
    assert all(torch.equal(loaded[f"state/{name}"], value) for name, value in state.items())


def test_keys_that_read_alike_stay_apart(tmp_path: Path) -> None:
    state = {1: torch.tensor(1), "1": torch.tensor(2), "a/b": torch.tensor(3), "a": {"b": torch.tensor(4)}}
    assert same(through_a_file(state, tmp_path), state)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, betas=(0.8, 0.9)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_goes_on_the_same(name: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        convolution = nn.Conv2d(2, 3, 2)
        if name != "lbfgs":  # which takes no gradients of such strides
            convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's, left out
        model = nn.Sequential(convolution, nn.Flatten(), nn.Linear(12, 2))
        return model, _OPTIMIZERS[name](model.parameters())

    inputs = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss: Tensor = model(inputs).square().mean()
            loss.backward()
            return loss.item()

        optimizer.step(closure)

    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    again, other = make()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(through_a_file(optimizer.state_dict(), tmp_path))
    assert same(other.state_dict(), optimizer.state_dict())
    for _ in range(3):
        step(model, optimizer)
        step(again, other)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
}


@pytest.mark.parametrize("name", _SCHEDULERS)
def test_a_scheduler_goes_on_the_same(name: str, tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        return optimizer, _SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for number in range(4):
            optimizer.step()
            scheduler.step(*([1.0 + number] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = make()
    rates(optimizer, scheduler)
    again, other = make()
    saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    loaded = through_a_file(saved, tmp_path)
    assert same(loaded, saved)
    again.load_state_dict(loaded["optimizer"])
    other.load_state_dict(loaded["scheduler"])
    assert rates(again, other) == rates(optimizer, scheduler)


def test_a_scaler_comes_back(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    scaler.update(512.0)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(through_a_file(scaler.state_dict(), tmp_path))
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (object(), "state/a/0 is of type object, which a checkpoint cannot hold; allowed: tensors,"),
        (range(2), "state/a/0 is of type range,"),
        (torch.zeros(2).to_sparse(), "state/a/0 is a torch.sparse_coo tensor: only strided"),
        (torch.zeros(2, device="meta"), "state/a/0 is a meta tensor: only strided"),
        (np.array(["a"]), "state/a/0 is an array of dtype <U1"),
        ({object(): 1}, "state/a/0: a key is of type object"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        write_state(tmp_path / "file", {"state": {"a": [value]}})
    assert str(caught.value).startswith(expected)
    assert not list(tmp_path.iterdir())


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    """A checkpoint that retention removes does not take a resumed run's state with it."""
    path = tmp_path / "file"
    write_state(path, {"state": torch.ones(1000)})
    with StateFile(path) as file:
        value = file.read("state")
    with path.open("r+b") as raw:
        raw.write(bytes(path.stat().st_size))
    assert bool((value == 1).all())
