"""`hocket export`, `hocket run --from`, and what plain torch goes on with: models without the ranks that wrote them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from training import Training, model_of
from training import on_ranks as train_on_ranks

import hocket
from hocket import attach, virtual
from hocket.session.save.saved_model import open_checkpoint

Hocket = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def same(given: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return given.keys() == expected.keys() and all(
        torch.equal(given[name], expected[name]) for name in expected
    )


# ---- from checkpoints ----------------------------------------------------------------------------------------------


def saved(folder: Path, strategy: str, ranks: int, steps: int = 5) -> list[dict[str, Tensor]]:
    """Save a training after some steps; return the replicas as they were."""
    training = Training([strategy], epochs=3)
    ended = train_on_ranks(ranks, training, save=(folder, [steps]), stop=steps)
    return [each.state for each in ended]


def mean_of(replicas: list[dict[str, Tensor]], name: str) -> Tensor:
    first = replicas[0][name]
    if all(torch.equal(first, each[name]) for each in replicas):
        return first
    return torch.stack([each[name].double() for each in replicas]).sum(0).div(len(replicas)).to(first.dtype)


def test_the_mean_of_a_checkpoint(tmp_path: Path, hocket: Hocket) -> None:
    replicas = saved(tmp_path / "checkpoints", "dpsgd", 3)
    ended = hocket("export", str(tmp_path / "checkpoints"), "--out", str(tmp_path / "out"))
    assert ended.status == 0, ended.err
    assert "the consensus of 3 ranks after step 5" in ended.out
    given = load_file(tmp_path / "out/model.safetensors")
    assert given.keys() == replicas[0].keys()
    averaged = [name for name in given if not name.endswith("num_batches_tracked")]
    assert all(torch.equal(given[name], mean_of(replicas, name)) for name in averaged)
    model_of().load_state_dict(given)


@pytest.mark.parametrize("strategy", ["sgd", "sgp"])
def test_it_is_the_consensus_of_the_session(strategy: str, tmp_path: Path) -> None:
    """Equal replicas to the bit, and push-sum's mean, which weighs replicas, to rounding."""

    def on_rank() -> dict[str, Tensor]:
        rank = hocket.join().rank
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        with hocket.attach(model, optimizer, strategy) as session:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 5, generator=generator)).square().mean().backward()
                optimizer.step()
            session.save(tmp_path)
            with session.consensus():
                return {name: value.clone() for name, value in model.state_dict().items()}

    expected, *_ = hocket.virtual(3).run(on_rank)
    with open_checkpoint(tmp_path / "step-00000003") as found:
        given = {name: found.tensors.value(name) for name in found.tensors.forms}
    if strategy == "sgd":
        assert same(given, expected)
    for name in expected:
        torch.testing.assert_close(given[name], expected[name], rtol=1e-6, atol=1e-7)


def test_one_ranks_replica(tmp_path: Path, hocket: Hocket) -> None:
    replicas = saved(tmp_path / "checkpoints", "dpsgd", 3)
    arguments = ["export", str(tmp_path / "checkpoints/step-00000005"), "--out", str(tmp_path / "out")]
    assert hocket(*arguments, "--replica", "1", "--format", "dcp").status == 0
    state = {"model": model_of().state_dict()}
    load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(state["model"], replicas[1])
    refused = hocket(*arguments, "--replica", "3")
    assert refused.status == 2
    assert "has no rank 3: allowed are 0 to 2" in refused.err


def test_plain_torch_goes_on_bit_for_bit(tmp_path: Path, hocket: Hocket) -> None:
    """A training of one rank, saved, exported, and continued without Hocket."""

    def batch(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(4, 5, generator=generator), torch.randint(0, 3, (4,), generator=generator)

    def made() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)

    def train(model: nn.Module, optimizer: Any, scheduler: Any, first: int, last: int) -> None:
        for number in range(first, last):
            optimizer.zero_grad()
            F.cross_entropy(model(batch(number)[0]), batch(number)[1]).backward()
            optimizer.step()
            scheduler.step()

    from hocket import attach

    whole, optimizer, scheduler = made()
    with attach(whole, optimizer, "sgd") as session:
        train(whole, optimizer, scheduler, 0, 4)
        session.save(tmp_path / "checkpoints", scheduler=scheduler)
        train(whole, optimizer, scheduler, 4, 8)
    ended = hocket(
        "export", str(tmp_path / "checkpoints"), "--out", str(tmp_path / "out"), "--format", "torch"
    )
    assert ended.status == 0, ended.err
    state = torch.load(tmp_path / "out/training.pt", weights_only=True)
    assert state["step"] == 4
    model, optimizer, scheduler = made()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["more"]["scheduler"])
    train(model, optimizer, scheduler, 4, 8)
    assert same(model.state_dict(), whole.state_dict())


# ---- runs ----------------------------------------------------------------------------------------------------------

RUN = ("-n", "2", "--transport", "virtual", "checkpoint.every=5", "-q")


@pytest.fixture(scope="module")
def run(hocket: Hocket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended") / "RUN"
    assert hocket("run", "dpsgd", *RUN, "steps=5", "--out", str(folder)).status == 0
    return folder


def begin(hocket: Hocket, source: Path, out: Path, *more: str) -> Any:
    """Begin a run in `out` with the model in `source`, which a step of size 0 leaves as it is."""
    given = ("-q", "steps=1", "optimizer.lr=0", "seed=5", "--from", str(source), "--out", str(out))
    return hocket("run", "sgd", *more, *given)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_run_begins_with_an_export(format: str, run: Path, tmp_path: Path, hocket: Hocket) -> None:
    """The run that begins with it, and makes no step of any size, ends with it."""
    expected = load_file(run / "model.safetensors")
    out = tmp_path / "out"
    assert hocket("export", str(run), "--out", str(out), "--format", format).status == 0
    begun = tmp_path / "begun"
    ended = begin(hocket, out, begun, *RUN[:-2])
    assert ended.status == 0, ended.err
    assert same(load_file(begun / "model.safetensors"), expected)
    assert json.dumps(str(out))[1:-1] in (begun / "config.yaml").read_text()


def test_checkpoints_of_plain_ddp_begin_a_run(run: Path, tmp_path: Path, hocket: Hocket) -> None:
    expected = load_file(run / "model.safetensors")
    wrapped = {f"module.{name}": value for name, value in expected.items()}
    save({"model": wrapped, "optimizer": {"lr": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    begun = tmp_path / "begun"
    ended = begin(hocket, tmp_path / "dcp", begun)
    assert ended.status == 0, ended.err
    assert same(load_file(begun / "model.safetensors"), expected)


@cache
def other_model() -> dict[str, Tensor]:
    return {"0.weight": torch.zeros(2, 2)}


def test_mistakes_are_named(
    run: Path, tmp_path: Path, hocket: Hocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(other_model(), "other.safetensors")
    Path("bad.safetensors").write_text("nothing")
    Path("model.pt").write_text("")
    Path("empty").mkdir()
    out = str(tmp_path / "out")
    checks: list[tuple[list[str], str]] = [
        (
            ["run", "sgd", "-q", "--from", "other.safetensors"],
            "other.safetensors holds another model: it lacks",
        ),
        (["run", "sgd", "-q", "--from", "nowhere"], "nowhere: there is no such file or folder"),
        (["run", "sgd", "-q", "--from", "bad.safetensors"], "is not a safetensors file, or is damaged"),
        (["run", "sgd", "-q", "--from", "model.pt"], "model.pt needs pickle, which can run any code"),
        (["run", "sgd", "-q", "--from", "empty"], "empty holds no model: expected model.safetensors"),
        (["run", "sgd", "-q", "--from", str(run / "checkpoints")], "is the folder of a run. `hocket export"),
        (
            ["export", str(run), "--out", out, "--format", "hf"],
            "which has no save_pretrained: use --format safet",
        ),
        (["export", "empty", "--out", out, "--format", "torch"], "there is no complete checkpoint in empty"),
        (["export", str(run), "--out", str(run)], "holds other results of Hocket, not an export"),
        (["export", str(run), "--out", out, "--state"], "--state works only with --format dcp"),
        (["export", str(run), "--out", out, "--model", "a:b"], "--model works only with --format hf"),
        (["export", "other.safetensors", "--out", out, "--format", "hf"], "--format hf needs the model"),
        (
            ["resume", str(run), "-q", "start_from=other.safetensors"],
            "start_from is None, but you asked for other.safetensors",
        ),
    ]
    for arguments, message in checks:
        ended = hocket(*arguments)
        assert ended.status == 2, arguments
        assert message in ended.err.replace("\n", " "), ended.err
        assert not Path(out).exists()


def test_a_run_without_a_model_is_told_where_one_may_be(run: Path, tmp_path: Path, hocket: Hocket) -> None:
    """A script saves where it likes, and a run that was cut off may have saved nothing."""

    def train() -> None:
        model = nn.Linear(4, 2)
        with attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "agd", out=tmp_path / "script"):
            pass

    virtual(2).run(train)
    shutil.copytree(run, tmp_path / "cut", ignore=shutil.ignore_patterns("checkpoints", "model*", "summary*"))
    of_script = (
        f"{tmp_path / 'script'} is the run of a script, not a checkpoint: pass the folder that the script gives to "
        "session.save or session.export"
    )
    for arguments, message in (
        (["script"], of_script),
        (["script", "--format", "torch"], of_script),
        (
            ["cut"],
            "With checkpoint.every=N a run saves checkpoints; at its end it writes its model to model.safetensors",
        ),
    ):
        ended = hocket("export", str(tmp_path / arguments[0]), "--out", str(tmp_path / "out"), *arguments[1:])
        assert ended.status == 2
        assert (
            f"there is no complete checkpoint in {tmp_path / arguments[0] / 'checkpoints'}. {message}"
            in ended.err
        )
    shutil.copytree(run / "checkpoints", tmp_path / "script" / "checkpoints")
    ended = hocket("export", str(tmp_path / "script"), "--out", str(tmp_path / "out"))
    assert ended.status == 0, ended.err
    ended = hocket("export", str(tmp_path / "script"), "--out", str(tmp_path / "out"), "--format", "hf")
    assert "does not name: give a function that returns it, --model" in ended.err
