"""The device and the precision of a run, as far as a machine without a GPU can show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.config.settings import Device
from hocket.errors import AttachError, UserError
from hocket.session.refusals import check_devices
from hocket.strategy import compose
from hocket.training import devices
from hocket.training.loop import train
from hocket.training.run import load_run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_has_cuda", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_has_cuda", lambda: False)


def choose(recipe: str, *overrides: str) -> Device:
    return devices.choose_device(load_run(recipe, overrides))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("recipe", "overrides", "device"),
    [
        ("sgd", (), Device.CUDA),
        ("sgd", ("device=cpu",), Device.CPU),
        ("sgd", ("transport=virtual",), Device.CPU),
        ("dpsgd", ("transport=virtual",), Device.CUDA),
        (
            "dpsgd",
            ("transport=virtual", "phases={5: {parameters: [], gradients: [{collective: allreduce}]}}"),
            Device.CPU,
        ),
    ],
)
def test_auto_takes_a_gpu_that_the_run_can_use(
    recipe: str, overrides: tuple[str, ...], device: Device
) -> None:
    assert choose(recipe, *overrides) is device


@pytest.mark.usefixtures("gpu")
def test_virtual_ranks_exchange_no_gradients_on_a_gpu() -> None:
    with pytest.raises(UserError, match=r"device=cuda is not possible: virtual ranks .* Use device=cpu"):
        choose("sgd", "device=cuda", "transport=virtual")


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_there_is_no_surprise() -> None:
    assert choose("sgd") is Device.CPU
    with pytest.raises(UserError, match="torch finds no CUDA device here"):
        choose("sgd", "device=cuda")


def test_a_session_refuses_virtual_ranks_on_a_device() -> None:
    model = nn.Linear(2, 2, device="meta")

    def body() -> None:
        check_devices(model, compose("dpsgd"), hocket.join())
        with pytest.raises(
            AttachError, match="the model is on meta, and sgd exchanges gradients: virtual ranks"
        ):
            check_devices(model, compose("sgd"), hocket.join())

    hocket.virtual(2).run(body)


def test_a_session_knows_its_place_on_its_host() -> None:
    def body() -> tuple[int, int]:
        model = nn.Linear(2, 2)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            return session.rank, session.local_rank

    assert all(rank == local for rank, local in hocket.virtual(3).run(body))


def training(folder: Path, *overrides: str) -> tuple[float, torch.dtype, set[torch.dtype]]:
    """Return the training loss, in which dtype the model's output came, and in which its parameters are."""
    folder.mkdir()
    run = load_run("sgd", ("steps=5", *overrides))
    seen: list[torch.dtype] = []
    kinds: set[torch.dtype] = set()

    def note(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        seen.append(output.dtype)
        kinds.update(p.dtype for p in module.parameters())

    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, output: note(module, given, output) if isinstance(module, nn.Linear) else None
    )
    try:
        summary = hocket.virtual(2).run(lambda: train(run, hocket.join(), folder))[0]
    finally:
        handle.remove()
    loss = summary["train_loss"]
    assert isinstance(loss, float)
    return loss, seen[0], kinds


def test_bf16_computes_in_bfloat16_and_keeps_float32(tmp_path: Path) -> None:
    plain, dtype, _ = training(tmp_path / "float32")
    assert dtype is torch.float32
    short, dtype, parameters = training(tmp_path / "bf16", "precision=bf16")
    assert dtype is torch.bfloat16
    assert parameters == {torch.float32}
    assert short == pytest.approx(plain, rel=0.02)
    assert short != plain
