"""Saves that a thread writes while training goes on: what is in them, when they are complete, and what fails."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import Training, on_ranks

import hocket
from hocket.checkpoint import folder as folders
from hocket.checkpoint import host_copies
from hocket.checkpoint.files import Prepared, StateFile, Written, write_prepared
from hocket.checkpoint.host_copies import HostCopies
from hocket.checkpoint.manifest import rank_file
from hocket.errors import CheckpointError
from hocket.session.save import saving
from hocket.session.save.save_point import SavePoint

STRATEGIES = ["sgd", "dpsgd", "sgp", "agd", "periodic_average", "local"]


class Gate:
    """A gate before the disk, at which threads that write stop while it is shut."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._opened.set()
        self.open, self.shut = self._opened.set, self._opened.clear
        #: Raised behind the gate, by rank.
        self.errors: dict[int, OSError] = {}

    def passing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def passed(path: Path, *given: Any) -> Any:
            assert self._opened.wait(60)
            for rank, error in self.errors.items():
                if path.name == rank_file(rank):
                    error.filename = str(path)
                    raise error
            return write(path, *given)

        return passed


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(saving, "write_prepared", made.passing(write_prepared))
    return made


class Script:
    """A small training script on one rank, step by step."""

    def __init__(self, strategy: str = "dpsgd") -> None:
        torch.manual_seed(hocket.join().rank)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.session = hocket.attach(self.model, self.optimizer, strategy)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(torch.randn(3, 4)), torch.tensor([0, 1, 0])).backward()
            self.optimizer.step()

    def bits(self) -> list[bytes]:
        held = [*self.model.parameters(), *(v for s in self.optimizer.state.values() for v in s.values())]
        return [tensor.detach().numpy().tobytes() for tensor in held]


def contents(folder: Path, rank: int) -> dict[str, bytes]:
    with StateFile(folder / rank_file(rank)) as file:
        names = [n for section in ("model", "optimizer", "parameters", "random") for n in file.names(section)]
        return {name: file.tensor(name).numpy().tobytes() for name in names}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_goes_on_from_it_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    expected = [result.bits() for result in on_ranks(2, Training((strategy,)))]
    beside = Training((strategy,), options={"blocking": False})
    assert [result.bits() for result in on_ranks(2, beside, save=(tmp_path, [4, 7]))] == expected
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000004", "step-00000007"]
    for path in folders.complete(tmp_path):
        assert [result.bits() for result in on_ranks(2, Training((strategy,)), load=path)] == expected


def test_what_is_written_is_of_the_step_that_saved(gate: Gate, tmp_path: Path) -> None:
    blocking, beside = tmp_path / "blocking", tmp_path / "beside"

    def run() -> None:
        script = Script()
        with script.session as session:
            script.step(2)
            session.save(blocking)
            gate.shut()
            path = session.save(beside, blocking=False)
            script.step(5)  # changes every tensor
            assert folders.complete(beside) == []
            assert path == beside / "step-00000002"
            gate.open()

    hocket.virtual(2).run(run)
    for rank in range(2):
        written = contents(beside / "step-00000002", rank)
        assert written == contents(blocking / "step-00000002", rank)
        assert len(written) > 12


def test_it_is_complete_at_a_later_step(tmp_path: Path) -> None:
    """Without a further save, and before the end."""

    def run() -> int:
        script = Script()
        with script.session as session:
            script.step()
            path = session.save(tmp_path, blocking=False)
            while not all(session.gather(path.exists())):
                script.step()
                assert session.step < 10_000
            return session.step

    assert min(hocket.virtual(2).run(run)) > 2


def test_a_rank_that_leaves_steps_out_is_not_waited_for(tmp_path: Path) -> None:
    """Its step ends with its next batch, and the other rank's before that: both gather something in between."""

    def run() -> int:
        script = Script("local")
        with script.session as session:
            session.peer.timeout_s = 10
            path = session.save(tmp_path, blocking=False)
            for _ in session.data(range(10_000), same_batches=True):
                script.optimizer.zero_grad()
                F.cross_entropy(script.model(torch.randn(3, 4)), torch.tensor([0, 1, 0])).backward()
                if session.rank == 0:
                    script.optimizer.step()
                if all(session.gather(path.exists())):
                    break
        return session.step

    assert max(hocket.virtual(2).run(run)) < 10_000
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000000"]


def test_the_second_save_waits_and_takes_the_same_memory(gate: Gate, tmp_path: Path) -> None:
    def run() -> None:
        script = Script()
        with script.session as session:
            places = set()
            for _ in range(3):
                script.step()
                gate.shut()
                session.save(tmp_path, blocking=False, keep=2)
                beside = session.inner.beside_training
                assert beside is not None
                places.add((beside.copies.nbytes, beside.copies._blocks[0].data_ptr()))
                gate.open()
            assert len(places) == 1
            size = (tmp_path / "step-00000002" / rank_file(session.rank)).stat().st_size
            assert beside is not None
            assert 0 < beside.copies.nbytes < size
        assert [path.name for path in folders.complete(tmp_path)] == ["step-00000002", "step-00000003"]

    hocket.virtual(1).run(run)


def test_load_waits_for_it(gate: Gate, tmp_path: Path) -> None:
    def run() -> None:
        script = Script()
        with script.session as session:
            script.step(3)
            before = script.bits()
            gate.shut()
            session.save(tmp_path, blocking=False)
            script.step(2)
            gate.open()
            assert session.load(tmp_path).step == 3
            assert script.bits() == before

    hocket.virtual(2).run(run)


def raised_by_a_step(script: Script, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        script.step(10_000)
    return str(caught.value)


def raised_by_a_save(script: Script, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        script.session.save(folder)
    return str(caught.value)


def raised_by_load(script: Script, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        script.session.load(folder)
    return str(caught.value)


@pytest.mark.one_of_each
@pytest.mark.parametrize("raised", [raised_by_a_step, raised_by_a_save, raised_by_load])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_what_one_rank_cannot_write_is_raised_by_all(
    raised: Callable[[Script, Path], str], code: int, gate: Gate, tmp_path: Path
) -> None:
    """After the same step; training is unharmed, the checkpoint before it stands, and the next save works."""
    text = OSError(code, "").strerror or errno.errorcode[code]

    def run() -> tuple[str, int]:
        script = Script()
        with script.session as session:
            script.step(2)
            session.save(tmp_path)
            session.gather(None)
            gate.errors = {1: OSError(code, text)}
            script.step()
            session.save(tmp_path, blocking=False)
            message, step = raised(script, tmp_path), session.step
            session.gather(None)
            gate.errors = {}
            assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
            expected = script.bits()
            session.save(tmp_path, blocking=False)
            script.step(3)
            session.load(tmp_path)
            assert script.bits() == expected
        return message, step

    told = hocket.virtual(2).run(run)
    assert told[0] == told[1]
    assert re.fullmatch(
        r"the checkpoint of step 3 was not written: its thread failed: rank 1: [^ ]*unfinished/rank-0001"
        rf"\.safetensors: {text}\. The model in memory and the last complete checkpoint are unchanged: fix the cause, "
        "and save again",
        told[0][0],
    )


def test_close_raises_it_on_all_ranks_and_closes(gate: Gate, tmp_path: Path) -> None:
    gate.errors = {1: OSError(errno.ENOSPC, "No space left on device")}

    def run() -> str:
        script = Script()
        script.step()
        gate.shut()
        script.session.save(tmp_path, blocking=False)
        gate.open()
        with pytest.raises(CheckpointError) as caught:
            script.session.close()
        assert script.session.inner.state.ended
        Script().session.close()  # all ranks are still here
        return str(caught.value)

    one, other = hocket.virtual(2).run(run)
    assert one == other
    assert "/rank-0001.safetensors: No space left on device. The model in memory and" in one
    assert list(tmp_path.iterdir()) == []


def test_one_that_failed_does_not_keep_a_job_that_is_asked_to_end_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, prepared: Prepared) -> Written:
        if path.parent.parent == tmp_path and path.name == rank_file(1):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_prepared(path, prepared)

    monkeypatch.setattr(saving, "write_prepared", write)

    def run() -> None:
        script = Script()
        with pytest.raises(SystemExit, match="143"), script.session as session:  # noqa: PT012
            session.save_on_signal(tmp_path / "last")
            script.step()
            session.save(tmp_path, blocking=False)
            point = session.inner.save_point
            assert isinstance(point, SavePoint)
            point.asked, point.target = True, 1
            point.agreed.set()
            script.step()

    hocket.virtual(2).run(run)
    assert [path.name for path in folders.complete(tmp_path / "last")] == ["step-00000001"]
    assert folders.complete(tmp_path) == []


def test_what_cannot_be_saved_is_raised_at_once(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"call": print}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    def run() -> None:
        with Script().session as session:
            with pytest.raises(CheckpointError, match=r"more/odd/call is of type builtin_function_or_method"):
                session.save(tmp_path, blocking=False, odd=Odd())
            assert session.rank or list(tmp_path.iterdir()) == []
            session.save(tmp_path, blocking=False)

    hocket.virtual(2).run(run)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_an_error_of_the_script_leaves_the_last_complete_one(gate: Gate, tmp_path: Path) -> None:
    def run() -> None:
        script = Script()
        with pytest.raises(ValueError, match="mine"), script.session as session:  # noqa: PT012
            script.step()
            session.save(tmp_path)
            script.step()
            gate.shut()
            session.save(tmp_path, blocking=False)
            session.gather(None)
            raise ValueError("mine")
        gate.open()

    hocket.virtual(2).run(run)
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000001"]

    def again() -> int:
        with Script().session as session:
            resumed = session.load(tmp_path)
            session.save(tmp_path)
            return resumed.step

    assert hocket.virtual(2).run(again) == [1, 1]
    assert folders.incomplete(tmp_path) == []


UNCLOSED = """
import sys, time, torch, hocket
from hocket.session.save import saving
model = torch.nn.Linear(4, 2)
session = hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd")
if sys.argv[2] == "slow":
    saving.write_prepared = lambda *_: time.sleep(60)
session.save(sys.argv[1], blocking=False)
if sys.argv[2] == "closed":
    session.close()
"""


@pytest.mark.parametrize("how", ["slow", "closed"])
def test_a_script_that_ends_without_close_is_told(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNCLOSED)
    command = [sys.executable, str(script), str(tmp_path / "saved"), how]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    warned = "hocket: warning: this process ends while a thread still writes the checkpoint of step 0"
    assert (warned in ended.stderr) is (how == "slow"), ended.stderr
    assert len(folders.complete(tmp_path / "saved")) == (how == "closed")


DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.uint16, torch.bool]


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_copies_have_the_bits_of_what_was_copied(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2, (64,), dtype=torch.uint8, generator=generator)
    tensors = {str(dtype): raw.view(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "odd": torch.arange(12.0).view(3, 4).T,
    }
    tensors["channels_last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    copies = HostCopies()
    for held in ({"first": torch.ones(3)}, tensors):  # with more memory than before
        taken, wait = copies.take(list(held.values()))
        wait()
    expected = b"".join(
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()
    )
    for tensor in tensors.values():
        tensor.zero_()
    assert copies.nbytes == len(expected)
    assert all(block.nbytes <= block_bytes for block in taken)
    assert b"".join(block.numpy().tobytes() for block in taken) == expected
