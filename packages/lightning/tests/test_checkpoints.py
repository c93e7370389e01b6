"""Checkpoints of Lightning's hold the replicas' mean, and beside them lies what every rank goes on from."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from nets import BATCH, Net, flat, on_ranks, samples, trainer
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, DistributedSampler

import hocket
from hocket.checkpoint import files
from hocket.session.save import saving

DILOCO = (
    "diloco",
    "parameters.0.every=4",
)  # of 6 steps an epoch: it is in the middle of a period at the end of one
AVERAGED = ("periodic_average", "parameters.0.every=4")
TOPK = (
    "agd",
    "gradients.0.collective=sparse_allreduce",
    "gradients.0.compressor={name: error_feedback, compressor: {name: topk, density: 0.2}}",
)


def fit(
    net: Net, *strategy: str, folder: Path | None = None, ckpt: Any = None, data: Any = None, **settings: Any
) -> Any:
    given: dict[str, Any] = {"max_epochs": 2, **settings}
    if folder is not None:
        given["callbacks"] = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last="link")]
        given["enable_checkpointing"] = True
    one = trainer(*strategy, **given)
    data = DataLoader(samples(), BATCH, shuffle=True) if data is None else data
    one.fit(net, data, DataLoader(samples(8), BATCH), ckpt_path=ckpt)
    return one


def test_a_checkpoint_holds_the_mean(tmp_path: Path) -> None:
    class Kept(Net):
        def on_train_epoch_end(self) -> None:
            trained.append(flat(self))

    trained: list[Tensor] = []
    on_ranks(lambda: fit(Kept(), *AVERAGED, folder=tmp_path, max_epochs=1))
    loaded = Net.load_from_checkpoint(tmp_path / "epoch=0.ckpt", weights_only=False)
    assert not torch.equal(*trained)
    torch.testing.assert_close(flat(loaded), sum(trained) / 2)
    assert {each.name for each in tmp_path.iterdir()} == {"epoch=0.ckpt", "epoch=0.ckpt.hocket", "last.ckpt"}


@pytest.mark.parametrize("strategy", [DILOCO, TOPK], ids=["outer", "residuals"])
@pytest.mark.parametrize("name", ["epoch=0.ckpt", "last.ckpt"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, strategy: tuple[str, ...], name: str) -> None:
    def net() -> Net:
        return Net(dropout=0.3, rate=0.01, adam=True)

    def uninterrupted() -> Tensor:
        fit(whole := net(), *strategy, max_epochs=3)
        return flat(whole)

    def resumed() -> Tensor:
        torch.manual_seed(77)
        fit(again := net(), *strategy, max_epochs=3, ckpt=tmp_path / name)
        return flat(again)

    expected = on_ranks(uninterrupted)
    on_ranks(lambda: fit(net(), *strategy, folder=tmp_path, max_epochs=1))
    assert torch.equal(on_ranks(resumed)[1], expected[1])


@pytest.mark.parametrize("step", [6, 8], ids=["at an epoch's end", "within an epoch"])
def test_a_loader_of_hocket_s_goes_on_where_it_was(tmp_path: Path, step: int) -> None:
    def weights(**settings: Any) -> Tensor:
        own = hocket.loader(samples(), BATCH, seed=5)
        given = {"max_epochs": 3, "use_distributed_sampler": False, **settings}
        fit(net := Net(dropout=0.3), *DILOCO, data=own, **given)
        return flat(net)

    def interrupted() -> Tensor:
        saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=step, save_top_k=-1)
        return weights(callbacks=[saves], enable_checkpointing=True, max_steps=10)

    whole = on_ranks(weights)
    on_ranks(interrupted)
    assert torch.equal(on_ranks(lambda: weights(ckpt=tmp_path / f"step={step}.ckpt"))[1], whole[1])


class Ask(Callback):
    """Asks the process to end after a step, as a scheduler asks the job."""

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        if trainer.global_step == 15:  # of 12 an epoch
            signal.raise_signal(signal.SIGTERM)


def test_a_job_that_is_asked_to_end_saves_and_goes_on_exactly(tmp_path: Path) -> None:
    """In the middle of an epoch; a loader of `hocket.loader` goes on at its place."""

    def weights(name: str, *more: Callback) -> Tensor:
        net, kept = Net(0.2), ModelCheckpoint(tmp_path / name)
        given: dict[str, Any] = {"callbacks": [kept, *more], "enable_checkpointing": True}
        one = trainer(*DILOCO, use_distributed_sampler=False, **given)
        one.fit(net, hocket.loader(samples(), BATCH, seed=0), ckpt_path="last")
        return flat(net)

    whole = weights("whole")
    with pytest.raises(SystemExit, match="143"):
        weights("asked", Ask())
    assert sorted(each.name for each in (tmp_path / "asked").glob("last-signal*")) == [
        "last-signal.ckpt",
        "last-signal.ckpt.hocket",
    ]
    assert torch.equal(weights("asked"), whole)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class Fail(Callback):
    """Fails after a step."""

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        if trainer.global_step == 2:
            raise ZeroDivisionError


def test_a_fit_after_one_that_failed_saves_when_it_is_asked_to_end(tmp_path: Path) -> None:
    def fit_with(callback: Callback) -> None:
        given: dict[str, Any] = {
            "callbacks": [callback, ModelCheckpoint(tmp_path)],
            "enable_checkpointing": True,
        }
        one = trainer(*DILOCO, use_distributed_sampler=False, **given)
        one.fit(Net(), hocket.loader(samples(), BATCH, seed=0))

    with pytest.raises(ZeroDivisionError):
        fit_with(Fail())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(SystemExit, match="143"):
        fit_with(Ask())
    assert is_whole(tmp_path / "last-signal.ckpt.hocket")


def test_a_checkpoint_without_the_ranks_states_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_ranks(lambda: fit(Net(), *DILOCO, folder=tmp_path, max_epochs=1))
    (tmp_path / "epoch=0.ckpt.hocket").rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, "hocket"):
        on_ranks(lambda: fit(Net(), *DILOCO, ckpt=tmp_path / "epoch=0.ckpt"))
    [warning] = [
        each.message for each in caplog.records if "each rank's own state is missing" in each.message
    ]
    assert "epoch=0.ckpt.hocket" in warning
    assert warning.endswith("so that synchronous_steps apply again")


def test_another_number_of_ranks_goes_on_from_the_mean(tmp_path: Path) -> None:
    on_ranks(lambda: fit(Net(), *DILOCO, folder=tmp_path, max_epochs=1))
    steps = on_ranks(lambda: fit(Net(), *DILOCO, ckpt=tmp_path / "epoch=0.ckpt").global_step, 3)
    assert steps == [10, 10, 10]  # 6 of 2 ranks, 4 of 3


def test_checkpoints_are_removed_whole(tmp_path: Path) -> None:
    def rank() -> None:
        best = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="val", save_top_k=1)
        one = trainer(*DILOCO, max_epochs=4, callbacks=[best], enable_checkpointing=True)
        one.fit(Net(), DataLoader(samples(), BATCH), DataLoader(samples(8), BATCH))

    on_ranks(rank)
    files = sorted(each.name for each in tmp_path.iterdir())
    assert len(files) == 2
    assert files[1] == f"{files[0]}.hocket"


def test_weights_alone_need_no_state(tmp_path: Path) -> None:
    def rank() -> None:
        weights = ModelCheckpoint(tmp_path, filename="{epoch}", save_weights_only=True)
        one = trainer("sgd", max_epochs=1, callbacks=[weights], enable_checkpointing=True)
        one.fit(Net(), DataLoader(samples(), BATCH))
        one.save_checkpoint(tmp_path / "end.ckpt")

    on_ranks(rank)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["end.ckpt", "epoch=0.ckpt"]


def test_a_checkpoint_that_is_written_again_has_the_newest_state(tmp_path: Path) -> None:
    class Saves(Net):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "same.ckpt")

    on_ranks(lambda: fit(Saves(), "sgd"))
    on_ranks(lambda: fit(Saves(), "sgd", max_epochs=1))
    token = torch.load(tmp_path / "same.ckpt", weights_only=False)["hocket"]
    assert [each.name for each in (tmp_path / "same.ckpt.hocket").iterdir()] == [token]


class Averages(Callback):
    """Keeps the mean of a rank's weights over time, saves it as the model, and gives it to the model at the end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        self.seen.append({key: value.clone() for key, value in pl_module.state_dict().items()})

    def mean(self) -> dict[str, Tensor]:
        return {key: torch.stack([each[key] for each in self.seen]).mean(0) for key in self.seen[0]}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self.mean()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = flat(pl_module)
        pl_module.load_state_dict(self.mean())


@pytest.mark.parametrize("strategy", [DILOCO, AVERAGED, ("sgd",)], ids=lambda each: each[0])
def test_averages_over_time_are_averaged_over_ranks(tmp_path: Path, strategy: tuple[str, ...]) -> None:
    """In the checkpoint and in the trained model; a callback finds the replicas' mean at the end."""

    def rank() -> tuple[Tensor, Tensor, Tensor]:
        own, kept = Averages(), ModelCheckpoint(tmp_path, filename="{epoch}")
        settings: dict[str, Any] = {"max_epochs": 1, "callbacks": [own, kept], "enable_checkpointing": True}
        trainer(*strategy, **settings).fit(net := Net(), DataLoader(samples(), BATCH))
        return flat(net), own.found, torch.cat([each.reshape(-1) for each in own.mean().values()])

    one, other = on_ranks(rank)
    assert torch.equal(one[2], other[2]) == (strategy == ("sgd",))
    torch.testing.assert_close(one[0], (one[2] + other[2]) / 2)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    torch.testing.assert_close(
        flat(Net.load_from_checkpoint(tmp_path / "epoch=0.ckpt", weights_only=False)), one[0]
    )


class Normed(Net):
    """A network with BatchNorm; saves itself at the end."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder = folder
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(f"{self.folder}/last.ckpt")

    def statistics(self) -> Tensor:
        buffers = dict(self.net.named_buffers())
        return torch.cat([buffers["1.running_mean"], buffers["1.running_var"]])


@pytest.mark.parametrize("strategy", [DILOCO, AVERAGED, ("sgd",)], ids=lambda each: each[0])
def test_stochastic_weight_averages_have_the_statistics_of_their_mean(
    tmp_path: Path, strategy: tuple[str, ...]
) -> None:
    """In the trained model and in a checkpoint of it: the callback's last pass, for BatchNorm, is over their mean."""

    def rank() -> tuple[Tensor, Tensor, Tensor, Any]:
        own = StochasticWeightAveraging(0.05, swa_epoch_start=1)
        sampler: Any = DistributedSampler(samples(), 2, hocket.join().rank, shuffle=False)
        data = DataLoader(samples(), BATCH, sampler=sampler)
        settings: dict[str, Any] = {"callbacks": [own], "use_distributed_sampler": False}
        trainer(*strategy, **settings).fit(net := Normed(str(tmp_path)), data)
        assert own._average_model is not None
        return flat(net), net.statistics(), flat(own._average_model), data

    one, other = on_ranks(rank)
    mean = Normed()
    each: list[Tensor] = []
    nn.utils.vector_to_parameters((one[2] + other[2]) / 2, mean.parameters())
    for _, _, _, data in one, other:
        update_bn(data, mean.net)
        each.append(mean.statistics().clone())
    last = Normed.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    for weights, statistics in one[:2], other[:2], (flat(last), last.statistics()):
        torch.testing.assert_close(weights, flat(mean))
        torch.testing.assert_close(statistics, sum(each) / 2)


# ---- saves beside training -----------------------------------------------------------------------------------------

BESIDE: dict[str, Any] = {"options": {"blocking_saves": False}}


def is_whole(folder: Path) -> bool:
    return any(folder.glob("*/step-????????/manifest.json"))


@pytest.mark.parametrize("strategy", [DILOCO, TOPK], ids=["outer", "residuals"])
def test_a_run_that_saves_beside_training_is_resumed(tmp_path: Path, strategy: tuple[str, ...]) -> None:
    def trained(folder: Path | None = None, **settings: Any) -> Tensor:
        torch.manual_seed(77 if "ckpt" in settings else 0)
        fit(net := Net(dropout=0.3, rate=0.01, adam=True), *strategy, folder=folder, **settings)
        return flat(net)

    expected = on_ranks(lambda: trained(max_epochs=3))
    saved = on_ranks(lambda: trained(tmp_path, max_epochs=3, **BESIDE))
    assert torch.equal(saved[1], expected[1])
    resumed = on_ranks(lambda: trained(max_epochs=3, ckpt=tmp_path / "epoch=1.ckpt", **BESIDE))
    assert torch.equal(resumed[1], expected[1])


def test_one_checkpoint_is_whole_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a newer one replaces it, which a slow disk takes a while to write."""
    write = files.write_prepared

    def slowly(*given: Any) -> Any:
        time.sleep(0.1)
        return write(*given)

    monkeypatch.setattr(saving, "write_prepared", slowly)
    seen: list[int] = []

    class Looks(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0 and self.current_epoch > 1:
                seen.append(sum(is_whole(Path(f"{each}.hocket")) for each in tmp_path.glob("*.ckpt")))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", float(self.current_epoch), sync_dist=True)

    def rank() -> None:
        best = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="val", save_top_k=1, mode="max")
        one = trainer(*DILOCO, max_epochs=5, callbacks=[best], enable_checkpointing=True, **BESIDE)
        one.fit(Looks(), DataLoader(samples(), BATCH), DataLoader(samples(8), BATCH))

    on_ranks(rank)
    assert min(seen) >= 1
    [file, folder] = sorted(each.name for each in tmp_path.iterdir())
    assert folder == f"{file}.hocket"
    assert is_whole(tmp_path / folder)


def test_what_is_written_over_is_waited_for(tmp_path: Path) -> None:
    class Saves(Net):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "same.ckpt")
            if self.current_epoch:
                assert is_whole(tmp_path / "same.ckpt.hocket")

    on_ranks(lambda: fit(Saves(), "sgd", max_epochs=2, **BESIDE))
