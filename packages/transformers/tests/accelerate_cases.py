"""The cases of Accelerate's loops that two ranks carry out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tiny import BATCH, RATE, Texts, model, weights
from torch.utils.data import DataLoader

import hocket
from hocket.api import Peer, gather
from hocket.errors import UserError
from hocket_transformers import exchanging


def of_accelerate(peer: Peer, strategy: list[str], accumulated: int, prepared: bool) -> list[float]:
    """Return the weights of a loop of Accelerate's over loaders of its own."""
    AcceleratorState._reset_state()  # of the Trainer before, and its precision, which Transformers 4 leaves behind
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    trained: Any = model(0.0)
    optimizer: Any = torch.optim.SGD(trained.parameters(), lr=RATE)
    loader: Any = DataLoader(Texts(48), BATCH)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    if prepared:
        trained = accelerator.prepare(trained)
    with exchanging(accelerator, trained, optimizer, *strategy) as session:
        for batch in loader:
            with accelerator.accumulate(trained):
                accelerator.backward(trained(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        assert session.step == 6 // accumulated
    return weights(accelerator.unwrap_model(trained))


def kept_by_accelerate(peer: Peer, folder: str, strategy: list[str], stop: int) -> dict[str, Any]:
    """Train, saving by `save_state` after some steps, and again from there by `load_state`.

    Returns:
        The weights of both at the end; the replicas' mean at the save, and the model that was saved.
    """
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    means: list[list[float]] = []

    def trained(from_: int) -> list[float]:
        accelerator = Accelerator(cpu=True)
        own: Any = model(0.0)  # beginning a pass of a DataLoader draws a random number
        made = (own, torch.optim.AdamW(own.parameters(), lr=RATE), DataLoader(Texts(80), BATCH))
        wrapped, optimizer, loader = accelerator.prepare(*made)
        with exchanging(accelerator, wrapped, optimizer, *strategy) as session:
            if from_:
                accelerator.load_state(folder)
                loader = skip_first_batches(loader, from_)
            for batch in loader:
                accelerator.backward(wrapped(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                if session.step == stop and not from_:
                    accelerator.save_state(folder)
                    with session.consensus():
                        means.append(weights(own))
            assert session.step == 10
        return weights(own)

    whole = trained(0)
    again = trained(stop)
    saved = model()
    kept = {
        name.removeprefix("module."): v for name, v in load_file(Path(folder, "model.safetensors")).items()
    }
    saved.load_state_dict(kept, strict=False)
    return {"whole": whole, "again": again, "mean": means[0], "saved": weights(saved)}


def alone_by_accelerate(peer: Peer) -> str:
    """Return the reason for which `exchanging` refuses an Accelerator that takes its rank for the only one."""

    class Alone(Accelerator):  # type: ignore[misc]
        """An Accelerator as it is made without GPUs."""

        num_processes = 1

    AcceleratorState._reset_state()
    own = model()
    try:
        with exchanging(Alone(cpu=True), own, torch.optim.SGD(own.parameters(), lr=RATE), "agd"):
            return ""
    except UserError as error:
        return str(error)


def loaded_by_accelerate(peer: Peer, folder: str) -> str:
    """Return the reason for which `exchanging` does not load what `save_state` has saved outside of it."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    own: Any = model(0.1)
    wrapped, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE))
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with exchanging(accelerator, wrapped, optimizer, "agd"):
        try:
            accelerator.load_state(folder)
        except UserError as error:
            return str(error)
    return ""


def saved_without_exchanging(peer: Peer, folder: str) -> tuple[list[float], list[float]]:
    """Return the weights of a model that `hocket.attach` trains, and those that `save_model` has written meanwhile."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    own = model()
    with hocket.attach(own, torch.optim.SGD(own.parameters(), lr=RATE), "agd"):
        accelerator.save_model(own, folder)
        gather(peer, None)
        saved = model()
        for p in saved.parameters():
            p.data.zero_()
        saved.load_state_dict(
            load_file(Path(folder, "model.safetensors")), strict=False
        )  # tied weights are there once
        return weights(own), weights(saved)
