"""Validation, metrics and decisions of all ranks, on the replicas' mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from nets import BATCH, Net, fitted, flat, on_ranks, samples, trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import hocket
from hocket.errors import UserError
from hocket_lightning.trainer import TrainerStrategy


class Watched(Net):
    """A network that keeps its parameters of some moments."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[str, Tensor] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.moments["trained"] = flat(self)

    def on_validation_epoch_start(self) -> None:
        self.moments["validated"] = flat(self)

    def on_train_epoch_end(self) -> None:
        self.moments["afterwards"] = flat(self)


def test_validation_sees_the_mean_and_gives_replicas_back() -> None:
    def rank() -> dict[str, Tensor]:
        net, data = Watched(), DataLoader(samples(), BATCH)
        trainer("periodic_average", "parameters.0.every=4", max_epochs=1).fit(net, data, data)
        return {**net.moments, "at the end": flat(net)}

    one, other = on_ranks(rank)
    assert not torch.equal(one["trained"], other["trained"])
    mean = (one["trained"] + other["trained"]) / 2
    for moments in (one, other):
        torch.testing.assert_close(moments["validated"], mean)
        assert torch.equal(moments["afterwards"], moments["trained"])
    assert torch.equal(one["validated"], other["validated"])
    assert torch.equal(one["at the end"], other["at the end"])


def test_logged_values_are_reduced() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rank = float(self.trainer.global_rank)
            for reduction in ("mean", "sum", "min", "max"):
                self.log(reduction, rank, sync_dist=True, reduce_fx=reduction, on_step=False, on_epoch=True)
            gathered: Any = self.all_gather(torch.tensor(rank))
            assert gathered.tolist() == [0, 1]
            return super().training_step(batch, batch_idx)

    def rank() -> dict[str, float]:
        one = trainer("sgd", max_epochs=1)
        one.fit(Logs(), DataLoader(samples(), BATCH))
        return {key: value.item() for key, value in one.callback_metrics.items()}

    # Six steps a rank: sums of logged values add up over these, too.
    assert on_ranks(rank) == 2 * [{"mean": 0.5, "sum": 6.0, "min": 0.0, "max": 1.0}]


def test_metrics_of_all_ranks_are_one() -> None:
    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average="micro")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self.net(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)

    def rank() -> float:
        net = Measured()
        [found] = trainer("sgd").validate(net, DataLoader(samples(), BATCH), verbose=False)
        assert net.accuracy.dist_sync_fn is None
        return found["accuracy"]

    x, y = samples()[:]
    assert on_ranks(rank) == 2 * [(Net().net(x).argmax(1) == y).float().mean().item()]


def test_ranks_stop_early_together() -> None:
    class Worse(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # Rank 1 alone sees no improvement, as nothing is reduced.
            self.log("val", float(self.current_epoch) * (1 if self.trainer.global_rank else -1))

    def rank() -> int:
        data = DataLoader(samples(), BATCH)
        one = trainer("sgd", max_epochs=9, callbacks=[EarlyStopping("val", patience=2)])
        one.fit(Worse(), data, data)
        return one.current_epoch

    assert on_ranks(rank) == [3, 3]


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_evaluation_without_training_takes_rank_0_s_model(what: str) -> None:
    class Evaluated(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            predicted: Tensor = self.net(batch[0])
            return predicted

    def rank() -> Tensor:
        net = Evaluated()
        torch.manual_seed(hocket.join().rank)
        torch.nn.init.normal_(next(net.parameters()))
        getattr(trainer("diloco"), what)(net, DataLoader(samples(), BATCH))
        return flat(net)

    one, other = on_ranks(rank)
    assert torch.equal(one, other)


def test_what_cannot_be_reduced_is_refused() -> None:
    def rank() -> None:
        strategy = trainer("sgd").strategy
        with pytest.raises(UserError, match="reduce_op is product; allowed: mean, sum, min, max"):
            strategy.reduce(torch.ones(1), reduce_op="product")
        with pytest.raises(UserError, match="leave the group out"):
            strategy.all_gather(torch.ones(1), group="some")
        with pytest.raises(UserError, match="leave sync_grads=True out"):
            strategy.all_gather(torch.ones(1, requires_grad=True), sync_grads=True)
        assert strategy.reduce("text") == "text"
        assert strategy.broadcast(hocket.join().rank, src=1) == 1
        assert strategy.reduce(torch.tensor([1, 4]) * hocket.join().rank).tolist() == [0.5, 2.0]

    on_ranks(rank)


def test_a_misspelt_strategy_is_named() -> None:
    refused = "overrides of the strategy are text"
    with pytest.raises(UserError, match=rf"^HocketStrategy\(every=...\): {refused}"):
        TrainerStrategy("agd", every=8)
    with pytest.raises(UserError, match=refused):
        TrainerStrategy("agd", ["gradients=[]"])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Did you mean 'diloco'"):
        trainer("dilocco")


def test_devices_have_to_be_the_ranks() -> None:
    with pytest.raises(
        UserError, match=r"ask for 2 ranks, but HocketStrategy does not start ranks: `hocket launch -n 2 "
    ):
        trainer("sgd", devices=2)
    assert on_ranks(lambda: trainer("sgd", devices=2).world_size) == [2, 2]
    with pytest.raises(UserError, match="devices=3, num_nodes=1 ask for 3 ranks, but 2 were started"):
        on_ranks(lambda: trainer("sgd", devices=3))


def test_normalisation_over_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="sync_batchnorm=True"):
        on_ranks(lambda: fitted(Net(), "sgd", sync_batchnorm=True))


def test_an_error_on_one_rank_reaches_it() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.global_rank == 1 and batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        on_ranks(lambda: fitted(Fails(), "sgd"))


def test_a_model_is_fitted_again() -> None:
    def rank() -> list[Tensor]:
        net, one = Net(), trainer("diloco", "parameters.0.every=6", max_epochs=1)
        data = DataLoader(samples(), BATCH)
        one.fit(net, data)
        one.fit_loop.max_epochs = 2
        one.fit(net, data)
        return [flat(net)]

    assert torch.equal(*(each[0] for each in on_ranks(rank)))
    assert isinstance(Net(), lightning.LightningModule)


@pytest.mark.parametrize("logger", [False, True])
def test_the_folder_of_a_run_has_what_the_module_logs(tmp_path: Path, logger: bool) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def on_train_epoch_end(self) -> None:
            validated.append(float(self.trainer.callback_metrics["val"]))

    validated: list[float] = []

    def rank() -> None:
        own = {"logger": logger, "default_root_dir": tmp_path, "log_every_n_steps": 2}
        one = trainer("agd", options={"out": tmp_path / "a"}, **own)
        before = one.loggers
        one.fit(Logging(), DataLoader(samples(), BATCH, shuffle=True), DataLoader(samples(8), BATCH))
        assert one.loggers == before

    on_ranks(rank)
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8, 10, 12]
    found = {row["step"]: row["val"] for row in rows if "val" in row}
    assert list(found) == [6, 12]
    assert sorted(validated) == sorted(2 * [*found.values()])  # each on two ranks
