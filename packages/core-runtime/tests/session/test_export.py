"""`session.export`: the consensus, or each replica, as plain torch, safetensors and DCP read it, to the bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from toys import Batch, batches, mlp, on_ranks, sgd

import hocket
from hocket.checkpoint import files, model_files
from hocket.checkpoint.model_files import ModelTensors, open_model
from hocket.errors import CheckpointError, UserError
from hocket.session.save.model_state import load_model, model_state

RANKS = 3


def trained(
    rank: int, strategy: str, use: Callable[[hocket.Session], Any], model: nn.Module | None = None
) -> Any:
    """Train four steps, the rank's own, and return what `use` makes of the session."""
    model = mlp() if model is None else model
    optimizer = sgd(model)
    with hocket.attach(model, optimizer, hocket.compose(strategy)) as session:
        for x, y in session.data(batches(rank, 4)):
            step(model, optimizer, (x, y))
        return use(session)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def read(folder: Path, format: str) -> dict[str, Tensor]:
    """Return an export's tensors, as others read them."""
    if format == "safetensors":
        tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
        return tensors
    state = {"model": mlp(7).state_dict()}
    load(state, checkpoint_id=folder, no_dist=True)
    return state["model"]


def same(given: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return given.keys() == expected.keys() and all(
        given[name].dtype == expected[name].dtype and torch.equal(given[name], expected[name])
        for name in expected
    )


@pytest.mark.one_of_each
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "sgp", "overlap_sgp"])
def test_it_is_the_consensus(strategy: str, format: Any, tmp_path: Path) -> None:
    def use(session: hocket.Session) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        before = state_of(session.model)
        assert session.export(tmp_path / "out", format) == tmp_path / "out"
        after = state_of(session.model)
        with session.consensus():
            return before, after, state_of(session.model)

    for before, after, mean in on_ranks(RANKS, lambda rank: trained(rank, strategy, use)):
        assert same(after, before)
        assert same(read(tmp_path / "out", format), mean)
        assert (strategy == "sgd") == same(before, mean)
    mlp().load_state_dict(read(tmp_path / "out", format))
    about = json.loads((tmp_path / "out/hocket-export.json").read_text())
    assert about["of"] == "consensus"
    assert about["step"] == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_each_rank_writes_its_own_replica(format: Any, tmp_path: Path) -> None:
    def use(session: hocket.Session) -> tuple[Path, dict[str, Tensor]]:
        place = session.export(tmp_path / "out", format, replica=True)
        with session.replica():
            return place, state_of(session.model)

    found = on_ranks(RANKS, lambda rank: trained(rank, "dpsgd", use))
    assert [place.name for place, _ in found] == ["replica-0000", "replica-0001", "replica-0002"]
    assert all(same(read(place, format), own) for place, own in found)
    assert not same(found[0][1], found[1][1])


def test_a_large_model_is_in_several_files_with_an_index(tmp_path: Path) -> None:
    def use(session: hocket.Session) -> dict[str, Tensor]:
        session.export(tmp_path / "out", max_shard_bytes=200)
        return state_of(session.model)

    expected, _ = on_ranks(2, lambda rank: trained(rank, "sgd", use))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], expected[name])
    with open_model(tmp_path / "out") as tensors:
        assert same({name: tensors.value(name) for name in tensors.forms}, expected)


class Odd(nn.Module):
    """A model with tied parameters, a buffer that is not kept, one that is, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.second(torch.tanh(self.first(x)))))
        return out

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_all_names_of_tied_tensors_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def use(session: hocket.Session) -> dict[str, Tensor]:
        session.export(tmp_path / "out")
        with session.consensus():
            return {
                name: value.clone()
                for name, value in session.model.state_dict().items()
                if name != "_extra_state"
            }

    def on_rank(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        state: dict[str, Tensor] = trained(rank, "dpsgd", use, Odd().double())
        return state

    with caplog.at_level(logging.WARNING, "hocket"):
        expected, _ = on_ranks(2, on_rank)
    assert {"first.weight", "second.weight", "norm.running_mean"} <= expected.keys()
    assert same(load_file(tmp_path / "out/model.safetensors"), expected)
    assert "_extra_state is not a tensor" in caplog.text


def test_names_are_those_of_the_model_without_wrappers() -> None:
    model = mlp()
    expected = model.state_dict()
    first, *others = model
    part: Any = torch.compile(first, backend="eager")
    compiled: Any = torch.compile(nn.Sequential(part, *others), backend="eager")
    assert same(model_state(compiled), expected)


# ---- the folder ----------------------------------------------------------------------------------------------------


def test_somebody_elses_files_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")

    def use(session: hocket.Session) -> str:
        with pytest.raises(CheckpointError) as refused:
            session.export(out)
        return str(refused.value)

    messages = on_ranks(2, lambda rank: trained(rank, "dpsgd", use))
    assert len(set(messages)) == 1
    assert "holds notes.txt, which Hocket did not write and does not replace" in messages[0]
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]


def test_an_earlier_export_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def use(session: hocket.Session) -> None:
        session.export(out, max_shard_bytes=200)
        session.export(out)
        (out / "README.md").write_text("mine") if session.is_main else None
        with pytest.raises(CheckpointError, match=r"holds README\.md"):
            session.export(out, "dcp")

    on_ranks(2, lambda rank: trained(rank, "dpsgd", use))
    names = {path.name for path in out.iterdir()}
    assert names == {".hocket.json", "hocket-export.json", "model.safetensors", "README.md"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_is_not_taken_for_an_export(tmp_path: Path) -> None:
    def use(session: hocket.Session) -> None:
        session.open_log(tmp_path / "run")
        session.log({"loss": 1.0})
        with pytest.raises(CheckpointError, match="holds other results of Hocket, not an export"):
            session.export(tmp_path / "run")

    on_ranks(2, lambda rank: trained(rank, "dpsgd", use))
    assert (tmp_path / "run/metrics.jsonl").exists()


def test_a_folder_of_exports_is_not_replaced(tmp_path: Path) -> None:
    def use(session: hocket.Session) -> None:
        session.export(tmp_path / "all", replica=True)
        with pytest.raises(
            CheckpointError, match=r"all holds exports \(replica-0000, replica-0001\): name a folder inside"
        ):
            session.export(tmp_path / "all")

    on_ranks(2, lambda rank: trained(rank, "dpsgd", use))
    assert len(list((tmp_path / "all").iterdir())) == 2


@pytest.mark.parametrize("name", [".", "", "..", "/"])
def test_the_working_directory_is_not_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in it would stand in a folder that is no more."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def use(session: hocket.Session) -> None:
        with pytest.raises(
            CheckpointError, match="is the working directory, or contains it: name a folder that"
        ):
            session.export(name)

    on_ranks(2, lambda rank: trained(rank, "dpsgd", use))
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("earlier", [False, True])
def test_a_kill_leaves_the_folder_as_it_was(
    earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill an export after each of its files; a later one removes what was left."""
    out = tmp_path / "out"
    write = files.write_tensors

    def use(session: hocket.Session) -> dict[str, Tensor]:
        if earlier:
            session.export(out)
        for number in range(4):
            written: list[int] = []

            def die(*given: Any, written: list[int] = written, number: int = number) -> None:
                if len(written) == number:
                    raise Killed
                written.append(1)
                write(*given)

            with monkeypatch.context() as patch:
                patch.setattr(model_files, "write_tensors", die)
                patch.setattr("shutil.rmtree", lambda *_, **__: None)
                with pytest.raises(Killed):
                    session.export(out, max_shard_bytes=100)
            if earlier:
                assert same(load_file(out / "model.safetensors"), state_of(session.model))
            else:
                assert not out.exists()
        assert len(list(tmp_path.glob("out.*.hocket-tmp"))) == 4
        session.export(out, max_shard_bytes=100)
        return state_of(session.model)

    expected = trained(0, "sgd", use)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with open_model(out) as tensors:
        assert same({name: tensors.value(name) for name in tensors.forms}, expected)


def test_a_kill_between_two_names_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier export has lost its name, and the new one has none yet: it is named, and put back."""
    out, rename = tmp_path / "out", Path.rename

    def die(path: Path, target: Path) -> Path:
        if target == out:
            raise Killed
        return rename(path, target)

    def stop(*_: Any) -> None:
        raise Killed

    def use(session: hocket.Session) -> dict[str, Tensor]:
        session.export(out, "safetensors")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", die)
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
            with pytest.raises(Killed):
                session.export(out, max_shard_bytes=100)
        assert not out.exists()
        with (
            pytest.raises(
                CheckpointError,
                match=r"no such file or folder; .*out\..* is a complete export, .* to out$",
            ),
            open_model(out),
        ):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(model_files, "write_tensors", stop)
            with pytest.raises(Killed):
                session.export(out)
        return state_of(session.model)

    expected = trained(0, "sgd", use)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "model.safetensors.index.json").exists()  # the newer one
    with open_model(out) as tensors:
        assert same({name: tensors.value(name) for name in tensors.forms}, expected)


def test_a_mount_point_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "out")

    def use(session: hocket.Session) -> None:
        with pytest.raises(
            CheckpointError, match=r"out is a mount point, .*: name a folder inside it, such as .*out/export"
        ):
            session.export(tmp_path / "out")
        session.export(tmp_path / "out/export")

    on_ranks(2, lambda rank: trained(rank, "dpsgd", use))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"format": "safetensor"},
            r"format is 'safetensor'\. Did you mean 'safetensors'\? Allowed: 'safetensors', 'dcp', 'hf'",
        ),
        (
            {"format": "hf"},
            "Sequential has no save_pretrained, which format='hf' needs: use format='safetensors'",
        ),
        ({"also": [3]}, "also=... holds a int, which has no save_pretrained"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0; allowed: 1 or more"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    def use(session: hocket.Session) -> None:
        with pytest.raises(CheckpointError, match=message):
            session.export(tmp_path / "out", **given)

    on_ranks(2, lambda rank: trained(rank, "dpsgd", use))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_is_named_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def use(session: hocket.Session) -> None:
        with pytest.raises(CheckpointError, match="file is a file: name a folder for the export"):
            session.export(tmp_path / "file/out")
        with pytest.raises(CheckpointError, match="is a file: name a folder for the export"):
            session.export(tmp_path / "file")

    on_ranks(2, lambda rank: trained(rank, "dpsgd", use))


# ---- what is read back ---------------------------------------------------------------------------------------------


def test_another_models_tensors_are_refused_in_one_message() -> None:
    model = mlp()
    given = {name.replace("2.", "3."): value for name, value in mlp(3).state_dict().items()}
    given["0.weight"] = torch.zeros(5, 5)
    before = state_of(model)
    with pytest.raises(CheckpointError) as refused:
        load_model(model, ModelTensors.held(given), "FILE")
    assert str(refused.value) == (
        "FILE holds another model: it lacks the model's 2.weight, 2.bias (did you mean 3.weight?); the model has no "
        "3.weight, 3.bias (did you mean 2.weight?); 0.weight is float32[5, 5], but float64[7, 5] in the model"
    )
    assert same(state_of(model), before)


@pytest.mark.parametrize("prefix", ["module.", "model.module.", "_orig_mod."])
def test_names_may_have_a_prefix(prefix: str) -> None:
    model, other = mlp(), mlp(3)
    given = {prefix + name: value for name, value in other.state_dict().items()}
    load_model(model, ModelTensors.held(given), "FILE")
    assert same(state_of(model), state_of(other))


def test_tied_tensors_may_have_one_name() -> None:
    torch.manual_seed(1)
    other, model = Odd(), Odd()
    given = {name: value for name, value in other.state_dict().items() if name != "second.weight"}
    load_model(model, ModelTensors.held(given), "FILE")
    assert torch.equal(model.second.weight, other.first.weight)


@pytest.mark.parametrize("call", ["save", "load", "export", "open_log", "save_on_signal"])
def test_a_path_that_none_can_be_is_refused_in_a_line(call: str) -> None:
    def use(session: hocket.Session) -> None:
        with pytest.raises(
            UserError, match=rf"^session\.{call}: 'a\\x00b' has a NUL byte, which no path can have"
        ):
            getattr(session, call)("a\0b")

    on_ranks(2, lambda rank: trained(rank, "dpsgd", use))
    with pytest.raises(UserError, match="has a NUL byte"):
        hocket.compose("a\0b.yaml")
    with pytest.raises(UserError, match=r"^out: "):
        hocket.virtual(1).run(lambda: hocket.attach(model := mlp(), sgd(model), "sgd", out="a\0b"))
