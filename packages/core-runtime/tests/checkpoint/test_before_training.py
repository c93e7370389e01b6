"""A folder that the first save would refuse is refused before the first step, on shared disks and on hosts' own."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from training import Training, model_of, on_ranks

import hocket
from hocket.checkpoint.folder import complete
from hocket.disk import locked
from hocket.errors import CheckpointError

HOST = socket.gethostname()
STEP = 3


@contextlib.contextmanager
def later(folder: Path) -> Iterator[None]:
    """Another run's checkpoint, of a later step."""
    on_ranks(1, Training(("local",)), save=(folder, [STEP]), stop=STEP)
    yield


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.touch()
    yield


@contextlib.contextmanager
def busy(folder: Path) -> Iterator[None]:
    """Another job is saving there."""
    folder.mkdir(parents=True)
    with locked(folder, "other"):
        yield


SITUATIONS: dict[Callable[[Path], AbstractContextManager[None]], str] = {
    later: rf"{{}} on {HOST} holds step-0000000{STEP}, which is later than step 0, at which training begins: continue ",
    unwritable: rf"{{}} on {HOST} cannot be written: File exists: name another folder",
    busy: r"another job is saving into {} \(run other, ",
}


def steps_until_refused(
    folders: Sequence[Path], prepare: Callable[[hocket.Session, Path], object]
) -> tuple[int, str]:
    """Return the steps of a run that saves after its first, and its error."""

    def run() -> tuple[int, str]:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = hocket.attach(model, optimizer, "dpsgd")
        folder = folders[session.rank]
        try:
            prepare(session, folder)
            for x in session.data([torch.ones(2, 4)], same_batches=True):
                model(x).sum().backward()
                optimizer.step()
            session.save(folder)
        except CheckpointError as error:
            return session.step, str(error)
        return session.step, ""

    found = hocket.virtual(len(folders)).run(run)
    assert len({*found}) == 1
    return found[0]


def begin_anew(session: hocket.Session, folder: Path) -> None:
    session.load(folder.parent.parent / "none", missing="start")
    session.save_on_signal(folder)


@pytest.mark.parametrize("own_disks", [False, True])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_a_save_refuses_is_refused_before_the_first_step(
    situation: Callable[[Path], AbstractContextManager[None]], own_disks: bool, tmp_path: Path
) -> None:
    bad = tmp_path / "bad" / "saved"
    folders = [tmp_path / "good" if own_disks else bad, bad]
    expected = SITUATIONS[situation].format(bad)
    with situation(bad):
        steps, said = steps_until_refused(folders, lambda *_: None)
        assert steps == 1
        assert said
        for prepare in (hocket.Session.save_on_signal, begin_anew):
            steps, said = steps_until_refused(folders, prepare)
            assert steps == 0
            assert re.search(expected, said)
            assert len(said.splitlines()) == 1


@pytest.mark.parametrize("situation", [unwritable, busy])
def test_a_folder_to_begin_or_go_on_in_is_tried(
    situation: Callable[[Path], AbstractContextManager[None]], tmp_path: Path
) -> None:
    folders = [tmp_path / "good", tmp_path / "bad"]
    with situation(folders[1]):
        steps, said = steps_until_refused(
            folders, lambda session, folder: session.load(folder, missing="start")
        )
    assert steps == 0
    assert re.search(SITUATIONS[situation].format(folders[1]), said)


def test_a_save_of_its_own_that_is_under_way_is_no_other_jobs(tmp_path: Path) -> None:
    def prepare(session: hocket.Session, folder: Path) -> None:
        session.save(folder, blocking=False)
        session.save_on_signal(folder)

    assert steps_until_refused([tmp_path] * 2, prepare) == (1, "")


def test_what_a_load_goes_on_from_or_passes_over_is_no_other_runs(tmp_path: Path) -> None:
    """Also where the folder was looked at before the load, and its newest checkpoint is damaged."""
    on_ranks(2, Training(("local",)), save=(tmp_path, [STEP, STEP + 1]), stop=STEP + 1)
    file = tmp_path / f"step-0000000{STEP + 1}" / "rank-0001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    def run() -> int:
        model = model_of()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], 0.5)
        with hocket.attach(model, optimizer, "local") as session:
            session.save_on_signal(tmp_path, scheduler=scheduler)
            session.load(tmp_path, missing="start", scheduler=scheduler)
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            session.save(tmp_path, scheduler=scheduler)
            return session.step

    assert hocket.virtual(2).run(run) == [STEP + 1] * 2
    assert [path.name for path in complete(tmp_path)] == [f"step-0000000{STEP}", f"step-0000000{STEP + 1}"]


def train_with_out(outs: Sequence[Path], *, loads: bool, with_data: bool = True) -> list[str]:
    """Return for each rank of a script what refuses its first step, with results and checkpoints in a folder."""

    def run() -> str:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = outs[hocket.join().rank]
        begun = -1
        try:
            with hocket.attach(model, optimizer, "dpsgd", out=out) as session:
                if loads:
                    session.load(out / "checkpoints", missing="start")
                begun = session.step
                for _ in range(2):
                    batches = [torch.ones(2, 4)]
                    for x in session.data(batches, same_batches=True) if with_data else batches:
                        model(x).sum().backward()
                        optimizer.step()
                session.save(out / "checkpoints")
        except CheckpointError as error:
            assert session.step == begun
            return str(error)
        (out / "summary.json").unlink(missing_ok=True)  # as if it was killed before its end
        return ""

    return hocket.virtual(len(outs)).run(run)


@pytest.mark.parametrize("with_data", [True, False])
def test_a_script_that_does_not_load_what_its_folder_holds(
    with_data: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the other host: its own results are rank 0's."""
    outs = [tmp_path / "a", tmp_path / "b"]
    with caplog.at_level(logging.WARNING, "hocket"):
        assert train_with_out(outs, loads=False) == ["", ""]
    [told] = caplog.messages
    assert f"{outs[0] / 'checkpoints'} on {HOST} is not visible to rank 1 on {HOST}, so each" in told
    expected = (
        f"{outs[0] / 'checkpoints'} on {HOST} holds step-00000002, which is later than step 0, at which training "
        "begins: continue from it with session.load, move it away, or save to another folder"
    )
    assert train_with_out(outs, loads=False, with_data=with_data) == [expected] * 2
    assert train_with_out(outs, loads=True, with_data=with_data) == ["", ""]
    again = [tmp_path / "new", outs[1]]
    assert (
        train_with_out(again, loads=False)
        == [expected.replace("/a/", "/b/").replace("00000002", "00000004")] * 2
    )


def test_a_script_may_save_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder beside its results that cannot be written is told, and refused if it saves there."""
    (tmp_path / "b").mkdir()
    with unwritable(tmp_path / "b" / "checkpoints"), caplog.at_level(logging.WARNING, "hocket"):

        def run() -> int:
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rank = hocket.join().rank
            with hocket.attach(model, optimizer, "dpsgd", out=tmp_path / "ab"[rank]) as session:
                for x in session.data([torch.ones(2, 4)], same_batches=True):
                    model(x).sum().backward()
                    optimizer.step()
                session.save(tmp_path / "elsewhere")
                return session.step

        assert hocket.virtual(2).run(run) == [1, 1]
    [told] = caplog.messages
    assert told == (
        f"session.save into this run's folder would fail: rank 1: {tmp_path / 'b' / 'checkpoints'} on {HOST} cannot be "
        "written: File exists: name another folder for checkpoints"
    )
