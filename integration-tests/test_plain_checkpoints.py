"""Checkpoints that plain scripts of torch's have written begin sessions and runs, with the very bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from islands import run_once
from islands.plain import made
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

import hocket
from hocket.cli.main import cli

NAMES = ("fsdp2", "ddp", "ddp by its own names")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train by each of the scripts on two ranks."""
    folder = tmp_path_factory.mktemp("plain")
    run_once(folder, "plain", 2, NAMES)
    return folder


def whole(written: Path, name: str) -> dict[str, torch.Tensor]:
    expected: dict[str, torch.Tensor] = torch.load(written / f"{name}.pt", weights_only=True)
    return expected


@pytest.mark.parametrize("name", NAMES)
def test_a_run_begins_with_it(name: str, written: Path, tmp_path: Path) -> None:
    """A run whose only step has size 0 ends with the values that it began with."""
    given = ("-q", "-n", "2", "--transport", "virtual", "steps=1", "optimizer.lr=0", "task.hidden=33")
    words = ["run", "sgd", *given, "--from", str(written / name), "--out", str(tmp_path / "out")]
    ended = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    begun, expected = load_file(tmp_path / "out/model.safetensors"), whole(written, name)
    assert begun.keys() == expected.keys()
    assert all(torch.equal(begun[each], expected[each]) for each in expected)


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_session_begins_with_it(name: str, written: Path) -> None:
    """With another number of ranks than have written it."""

    def on_rank() -> dict[str, torch.Tensor]:
        model = made(1)
        state = {"model": model.state_dict()}
        load(state, checkpoint_id=written / name, no_dist=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "sgd") as session, session.consensus():
            return {each: value.clone() for each, value in model.state_dict().items()}

    for begun in hocket.virtual(3).run(on_rank):
        assert all(torch.equal(begun[each], value) for each, value in whole(written, name).items())
