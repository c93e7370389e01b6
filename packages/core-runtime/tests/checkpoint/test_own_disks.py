"""Hosts that share no disk: each keeps its ranks' files, and a load fetches what a host lacks from the others.

A host is a folder of its own here; its ranks are threads.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import Result, Training, model_of, on_ranks

import hocket
from hocket.checkpoint import folder as folders
from hocket.checkpoint.manifest import MANIFEST
from hocket.errors import CheckpointError

TRAINING = Training(("dpsgd",), epochs=2)


def on_hosts(hosts: Sequence[Path], training: Training = TRAINING, **given: Any) -> list[Result]:
    """Run a training on ranks with a host's folder each, which the ranks save to and load from."""

    def run() -> Result:
        rank = hocket.join().rank
        own = {**given}
        if "save" in own:
            own["save"] = (hosts[rank], own["save"])
        if own.pop("loads", False):
            own["load"] = hosts[rank]
        return training(rank, **own)

    return hocket.virtual(len(hosts)).run(run)


def bits(results: Sequence[Result]) -> list[Any]:
    return [result.bits() for result in results]


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize("blocking", [True, False])
def test_each_host_keeps_its_ranks_files(
    blocking: bool, hosts: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = hosts
    training = Training(("dpsgd",), epochs=2, options={"blocking": blocking, "keep": 1})
    with caplog.at_level(logging.WARNING, "hocket"):
        on_hosts([a, a, b, b], training, save=[3, 6])
    [said] = caplog.messages
    assert said.startswith(f"{a} on ")
    assert "is not visible to ranks 2, 3 on " in said
    names = [sorted(path.name for path in (host / "step-00000006").iterdir()) for host in hosts]
    assert names == [
        [MANIFEST, "rank-0000.safetensors", "rank-0001.safetensors"],
        [MANIFEST, "rank-0002.safetensors", "rank-0003.safetensors"],
    ]
    assert [[path.name for path in host.iterdir()] for host in hosts] == [["step-00000006"]] * 2
    one, other = ((host / "step-00000006" / MANIFEST).read_text() for host in hosts)
    assert one == other


@pytest.mark.parametrize("order", ["abab", "bbaa", "baab", "aabb"])
def test_a_run_goes_on_with_hosts_and_ranks_in_another_order(order: str, hosts: tuple[Path, Path]) -> None:
    a, b = hosts
    expected = bits(on_ranks(4, TRAINING))
    on_hosts([a, b, a, b], save=[4], stop=4)
    again = [hosts["ab".index(name)] for name in order]
    assert bits(on_hosts(again, loads=True, save=[7])) == expected
    for host in {*again}:
        assert folders.newest_first(host)[0].name == "step-00000007"


def test_only_what_a_rank_needs_is_fetched(hosts: tuple[Path, Path]) -> None:
    a, b = hosts

    def files() -> list[list[str]]:
        return [sorted(path.name[:9] for path in host.glob("step*/rank*")) for host in hosts]

    def call(what: str, places: Sequence[Path]) -> None:
        def run() -> None:
            model = nn.Linear(3, 2)
            with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "dpsgd") as session:
                getattr(session, what)(places[session.rank])

        hocket.virtual(2).run(run)

    call("save", [a, b])
    call("load", [a, b])
    assert files() == [["rank-0000"], ["rank-0001"]]
    call("load", [b, a])
    assert files() == [["rank-0000", "rank-0001"]] * 2


def test_an_empty_host_gets_the_others_files(hosts: tuple[Path, Path], tmp_path: Path) -> None:
    """Rank 0's, with the frozen parameters that all ranks' files leave to it."""
    a, b = hosts
    expected = bits(on_ranks(2, TRAINING))
    on_hosts([a, b], save=[4], stop=4)
    shutil.copytree(a, tmp_path / "c", dirs_exist_ok=True)
    shutil.copytree(b, tmp_path / "c", dirs_exist_ok=True)
    assert bits(on_hosts([tmp_path / "new", tmp_path / "c"], loads=True)) == expected


@pytest.mark.parametrize("missing", ["error", "start"])
def test_a_host_that_is_gone_is_named(missing: str, hosts: tuple[Path, Path], tmp_path: Path) -> None:
    """Also where a script may begin anew, and where it is rank 0's."""
    a, b = hosts
    on_hosts([a, b], save=[3, 4], stop=4)
    lost = a if missing == "start" else b
    shutil.rmtree(lost)

    def run() -> str:
        rank = hocket.join().rank
        model = model_of()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], 0.5)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            with pytest.raises(CheckpointError) as caught:
                session.load((a, b)[rank], missing=missing, scheduler=scheduler)  # type: ignore[arg-type]
            return str(caught.value)

    file = "rank-0000.safetensors" if lost == a else "rank-0001.safetensors"
    for told in hocket.virtual(2).run(run):
        assert f"step-00000004/{file}: expected " in told
        assert "it is missing; no rank has it (saved on " in told
        assert "older ones are not complete (step-00000003): restore the files" in told


def test_the_newest_that_all_hosts_have_is_taken(
    hosts: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A kill may have come when one host had the newest, and the other did not yet."""
    a, b = hosts
    expected = bits(on_ranks(2, TRAINING))
    on_hosts([a, b], save=[3, 6], stop=6)
    (b / "step-00000006").rename(b / "step-00000006-abc.unfinished")
    caplog.clear()
    again = on_hosts([a, b], loads=True, save=[4, 7])
    assert bits(again) == expected
    assert [result.resumed.step for result in again if result.resumed] == [3, 3]
    assert "step-00000006 is passed over: " in caplog.text
    assert not folders.incomplete(b)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_another_number_of_ranks_goes_on_from_the_mean(
    ranks: int, hosts: tuple[Path, Path], tmp_path: Path
) -> None:
    a, b = hosts
    on_hosts([a, b, a, b], save=[4], stop=4)
    for host in hosts:
        shutil.copytree(host, tmp_path / "all", dirs_exist_ok=True)
    shared = Training(("dpsgd",), epochs=2)
    expected = bits(on_ranks(ranks, shared, load=tmp_path / "all"))
    if ranks == 1:
        shutil.copytree(a / "step-00000004", b / "step-00000004", dirs_exist_ok=True)
        assert bits(on_hosts([b], shared, loads=True)) == expected
    else:
        assert bits(on_hosts([a, b, b][:ranks], shared, loads=True)) == expected
