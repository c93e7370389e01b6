"""A state that does not fit is refused on every rank: file, key, expected, found. The model is left as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import Training, model_of, on_ranks

import hocket
from hocket.errors import CheckpointError

TRAINING = Training(("dpsgd",), epochs=2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with one checkpoint of two ranks."""
    on_ranks(2, TRAINING, save=(tmp_path / "checkpoints", [3]), stop=3)
    return tmp_path / "checkpoints"


def refused(training: Training, folder: Path) -> str:
    """Load on two ranks, which must both refuse, and return what they say."""

    def run(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            training(rank, load=folder)
        return str(caught.value)

    first, second = hocket.virtual(2).run(lambda: run(hocket.join().rank))
    assert first == second
    return first


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (
            Training(("dpsgd", "parameters.0.topology=exponential")),
            "step-00000003: strategy: parameters.0.topology.name: this session has exponential, the checkpoint ring",
        ),
        (
            Training(("local",)),
            "step-00000003: strategy: parameters.0.collective.name: this session has nothing, the checkpoint gossip",
        ),
        (
            Training(("dpsgd",), width=9),
            r"rank-0000.safetensors: model/parameters/1.weight: this session has float32\[9, 5\], "
            r"the checkpoint float32\[7, 5\] \(6 more differ\): "
            r"continue with the saved setting, or start again in another folder",
        ),
        (
            Training(("dpsgd",), optimizer="adam"),
            "step-00000003: optimizer: this session has Adam, the checkpoint SGD",
        ),
    ],
)
def test_of_something_else(training: Training, expected: str, saved: Path) -> None:
    assert re.search(expected, refused(training, saved))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] = ord("[")
    path.write_bytes(content)


def flip_last(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_manifest(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("rank-0001.safetensors", truncate, r"rank-0001.safetensors: expected \d+ bytes, found \d+; no rank has it"),
        ("rank-0001.safetensors", Path.unlink, r"rank-0001.safetensors: expected \d+ bytes, it is missing"),
        ("rank-0001.safetensors", flip, "rank 1: .*rank-0001.safetensors is damaged, or does not hold a rank's state"),
        ("rank-0001.safetensors", flip_last, "rank 1: .*rank-0001.safetensors has changed since it was written"),
        ("manifest.json", change_manifest(checksums={}), "manifest.json is damaged: checksums: found "),
        ("manifest.json", truncate, "manifest.json is damaged"),
        ("manifest.json", change_manifest(format=1), "has format 1, written by hocket-core .* reads 4"),
        ("manifest.json", change_manifest(step=None), "manifest.json is damaged: found run, ranks, "),
        ("manifest.json", Path.unlink, "there is no complete checkpoint in .*; step-00000003 is incomplete"),
    ],
)  # fmt: skip
def test_damage(name: str, damage: Callable[[Path], object], expected: str, saved: Path) -> None:
    damage(saved / "step-00000003" / name)
    assert re.search(expected, refused(TRAINING, saved))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_changed_bit_is_noticed_by_another_number_of_ranks(ranks: int, saved: Path) -> None:
    flip_last(saved / "step-00000003" / "rank-0001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-0001\.safetensors has changed since it was written"):
        on_ranks(ranks, TRAINING, load=saved)


def test_one_checkpoint_can_be_named(saved: Path) -> None:
    [result, _] = on_ranks(2, TRAINING, load=saved / "step-00000003", stop=4)
    assert result.resumed is not None
    assert result.resumed.path == saved / "step-00000003"


def test_nothing_is_there(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert refused(TRAINING, folder) == (
            f"there is no complete checkpoint in {folder}. To begin at step 0, call session.load(..., "
            "missing='start'); or name another folder"
        )


def test_other_versions_are_told(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = json.loads((saved / "step-00000003" / "manifest.json").read_text())
    change_manifest(versions={**manifest["versions"], "torch": "1.0"})(
        saved / "step-00000003" / "manifest.json"
    )
    on_ranks(2, TRAINING, load=saved, stop=4)
    [message] = [record.getMessage() for record in caplog.records]
    assert message == f"{saved / 'step-00000003'} was saved with torch 1.0; this is {torch.__version__}"


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"call": print}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError(f"no {state}")


def attached() -> tuple[nn.Module, hocket.Session]:
    model = model_of()
    return model, hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "local")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    _, session = attached()
    with pytest.raises(
        CheckpointError, match=r"^more/odd/call is of type builtin_function_or_method, which a"
    ):
        session.save(tmp_path, odd=Odd())
    with pytest.raises(
        CheckpointError, match=r"^session.save\(..., epoch=...\): int has no state_dict: give objects"
    ):
        session.save(tmp_path, epoch=3)  # type: ignore[arg-type]


class Longwinded:
    """Its text is more than a file can hold, as soon as it has been asked for once."""

    text = ""

    def state_dict(self) -> dict[str, Any]:
        text, self.text = self.text, "x" * 100_000_000
        return {"text": text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text = state["text"]


def test_what_cannot_be_read_again_removes_nothing(tmp_path: Path) -> None:
    _, session = attached()
    given = Longwinded()
    session.save(tmp_path, keep=1, given=given)
    with pytest.raises(CheckpointError, match=r"^more/given/text makes up most of 1\d{8} bytes of text"):
        session.save(tmp_path, keep=1, given=given)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    session.load(tmp_path, given=given)
    assert given.text == ""


def test_an_error_in_what_is_saved_is_everybodys(tmp_path: Path) -> None:
    class Broken(Odd):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no room")

    def run(rank: int) -> None:
        _, session = attached()
        with pytest.raises(
            CheckpointError, match=r"^rank 1: more/odd: Broken.state_dict failed: ValueError: no room$"
        ):
            session.save(tmp_path, odd=Broken() if rank else model_of())
        assert rank or list(tmp_path.iterdir()) == []
        assert session.save(tmp_path, odd=model_of()).is_dir()

    hocket.virtual(2).run(lambda: run(hocket.join().rank))


def test_names_that_were_saved(tmp_path: Path) -> None:
    _, session = attached()
    session.save(tmp_path, ema=model_of())
    with pytest.raises(
        CheckpointError, match=r"ema besides model and optimizer, but session.load got nothing:"
    ):
        session.load(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"more/ema: Odd cannot load the saved state \(ValueError: no \{"
    ):
        session.load(tmp_path, ema=Odd())


def test_a_refused_model_is_left_alone(saved: Path) -> None:
    def run(_: int) -> None:
        model = model_of(9)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with hocket.attach(model, optimizer, "dpsgd") as session:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with pytest.raises(CheckpointError):
                session.load(saved, scheduler=Odd())
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    hocket.virtual(2).run(lambda: run(hocket.join().rank))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        on_ranks(2, TRAINING, save=(tmp_path / "file", [1]))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """One rank cannot write: an error everywhere, what was there stays, nothing is left, and the next save works."""
    on_ranks(2, TRAINING, save=(tmp_path, [3]), stop=3)
    name = "rank-0001.safetensors"

    def run(rank: int) -> None:
        _, session = attached()
        session.inner.step = 4

        class Full(Odd):
            def state_dict(self) -> dict[str, Any]:
                if rank:
                    [path] = tmp_path.glob("*.unfinished")
                    (path / f"{name}.hocket-tmp").symlink_to("/dev/full")
                return {}

        with pytest.raises(CheckpointError, match=rf"^rank 1: [^ ]*/{name}: No space left on device$"):
            session.save(tmp_path, keep=1, odd=Full())
        assert rank or [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
        session.save(tmp_path, keep=1)

    hocket.virtual(2).run(lambda: run(hocket.join().rank))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_ranks_at_different_steps(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        _, session = attached()
        session.inner.step = rank
        with pytest.raises(
            CheckpointError, match=r"^the ranks save different steps: 0 on rank 0, 1 on rank 1"
        ):
            session.save(tmp_path)

    hocket.virtual(2).run(lambda: run(hocket.join().rank))


def test_within_an_accumulation(tmp_path: Path) -> None:
    model, session = attached()
    with session.accumulate():
        F.cross_entropy(model(torch.randn(4, 5)), torch.zeros(4, dtype=torch.int64)).backward()
    with pytest.raises(CheckpointError, match=r"save after optimizer.step\(\), not within an accumulation"):
        session.save(tmp_path)


def test_a_loader_with_less_data(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"had given 4 batches .* has only 1 now"):
        on_ranks(2, Training(("dpsgd",), samples=(4, 4)), load=saved)


def test_another_kind_of_loader(saved: Path) -> None:
    for kind in ("stateful", "generator"):
        with pytest.raises(CheckpointError, match=r"continue with the same kind of loader"):
            on_ranks(2, Training(("dpsgd",), kind), load=saved)


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_session_that_was_never_saved_begins_where_that_is_asked_for(
    cut_off: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a script does that is started again, also where its first save was cut off."""
    folder = tmp_path / "checkpoints"
    if cut_off:
        (folder / "step-00000003-abc.unfinished").mkdir(parents=True)

    def run(_: int) -> list[Any]:
        model = model_of()
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            begun = session.load(folder, missing="start")
            session.save(folder)
            gone_on = session.load(folder, missing="start")
            return [(each.path, each.step, each.epoch, each.exact) for each in (begun, gone_on)]

    expected = [(None, 0, 0, True), (folder / "step-00000000", 0, 0, True)]
    assert hocket.virtual(2).run(lambda: run(hocket.join().rank)) == [expected] * 2
    assert (
        "is incomplete, because a save or a copy was interrupted: it is skipped" in caplog.text
    ) == cut_off


def test_what_else_may_be_missing_is_refused(tmp_path: Path) -> None:
    _, session = attached()
    with pytest.raises(CheckpointError, match=r"missing is 'ok'; allowed: 'error', 'start'$"):
        session.load(tmp_path, missing="ok")  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [0, -1])
@pytest.mark.parametrize("call", ["save", "save_on_signal"])
def test_to_keep_none_is_refused(call: str, keep: int, tmp_path: Path) -> None:
    """It would remove the checkpoint that was just saved, too."""

    def run() -> None:
        model = nn.Linear(4, 2)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            session.save(tmp_path)
            message = rf"session\.{call}: keep is {keep}; allowed: 1 or more, or None to keep all"
            with pytest.raises(CheckpointError, match=message):
                getattr(session, call)(tmp_path, keep=keep)

    hocket.virtual(2).run(run)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


@pytest.mark.parametrize("call", ["save", "load", "save_on_signal", "export"])
def test_a_folder_that_the_system_does_not_take_is_named_on_all_ranks(call: str, tmp_path: Path) -> None:
    def run() -> str:
        model = nn.Linear(4, 2)
        with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd") as session:
            with pytest.raises(CheckpointError) as caught:
                getattr(session, call)(tmp_path / ("long" * 100))
            return str(caught.value)

    one, other = hocket.virtual(2).run(run)
    assert one == other
    assert re.search("longlong.*: File name too long", one)
