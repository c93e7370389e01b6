"""A Trainer's weights are those of a plain loop over a session, bit for bit."""

from __future__ import annotations

import itertools
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from nets import BATCH, Net, Stream, fitted, flat, looped, on_ranks, samples, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import hocket

STRATEGIES = [
    ("sgd",),
    ("diloco", "parameters.0.every=6"),
    ("dpsgd",),
    ("sgp",),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each[0])
def test_the_weights_are_those_of_a_plain_loop(strategy: tuple[str, ...]) -> None:
    by_trainer = on_ranks(lambda: fitted(Net(), *strategy), 3)
    by_loop = on_ranks(lambda: looped(Net(), *strategy), 3)
    for one, other in zip(by_trainer, by_loop, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(by_trainer[0], flat(Net()))


@pytest.mark.parametrize("strategy", [("sgd",), ("diloco", "parameters.0.every=3")], ids=lambda each: each[0])
def test_accumulation_and_clipping_are_those_of_a_plain_loop(strategy: tuple[str, ...]) -> None:
    given = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    by_trainer = on_ranks(lambda: fitted(Net(), *strategy, **given))
    by_loop = on_ranks(lambda: looped(Net(), *strategy, accumulate=2, clip=0.05))
    assert torch.equal(by_trainer[0], by_loop[0])
    assert not torch.equal(by_trainer[0], on_ranks(lambda: looped(Net(), *strategy, accumulate=2))[0])


class Counted(Net):
    """A network whose rank 0 keeps the bytes that it has sent a step."""

    sent: list[float]

    def on_train_end(self) -> None:
        session = self.trainer.strategy.session  # type: ignore[attr-defined]
        if session.is_main:
            Counted.sent.append(session.counters.bytes_sent / session.step)


def test_batches_that_add_up_are_sent_once() -> None:
    Counted.sent = []
    on_ranks(lambda: fitted(Counted(), "sgd"))
    on_ranks(lambda: fitted(Counted(), "sgd", accumulate_grad_batches=2))
    assert Counted.sent[0] == Counted.sent[1] > 0


def test_steps_send_no_losses_of_closures() -> None:
    class Closures(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closures.append(closure)
            return super().step(closure)

    class Stepped(Net):
        def configure_optimizers(self) -> Any:
            return Closures(self.parameters(), 0.1)

    closures: list[Any] = []
    # Torch's own, as nobody else's are known to be independent of what their closures do.
    Closures.__module__ = "torch.optim.sgd"
    on_ranks(lambda: fitted(Stepped(), "sgd"))
    assert closures == 24 * [None]


def test_ranks_clip_the_same_norm() -> None:
    class Norms(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            norms.append(nn.utils.get_total_norm(gradients).item())

    def norms_of_a_rank() -> list[float]:
        fitted(Norms(), "sgd")
        return norms

    norms: list[float] = []
    on_ranks(norms_of_a_rank)
    assert len(norms) == 2 * 12
    assert len(set(norms)) == 12


def test_scaled_losses_of_half_precision_train() -> None:
    class Scaled(Net):
        def on_after_backward(self) -> None:
            scales.add(scaler.get_scale())

    scales: set[float] = set()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    [whole] = on_ranks(lambda: fitted(Scaled(), "sgd", plugins=[plugin]), 1)
    assert scales == {128.0}
    [plain] = on_ranks(lambda: fitted(Net(), "sgd"), 1)
    torch.testing.assert_close(whole, plain, rtol=0.02, atol=0.02)


def test_bfloat16_keeps_replicas_equal() -> None:
    one, other = on_ranks(lambda: fitted(Net(), "sgd", precision="bf16-mixed"))
    assert torch.equal(one, other)
    torch.testing.assert_close(one, on_ranks(lambda: fitted(Net(), "sgd"))[0], rtol=0.05, atol=0.05)


def test_an_optimizer_that_needs_its_closure_gets_it() -> None:
    class Lbfgs(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    one, other = on_ranks(lambda: fitted(Lbfgs(), "sgd", max_epochs=1))
    assert torch.equal(one, other)
    assert not torch.equal(one, flat(Net()))


class Adapted(Net):
    """A network of which the adapter alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.down = nn.Linear(5, 1, bias=False)
        self.up = nn.Linear(1, 3, bias=False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x) + self.up(self.down(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


def test_adapters_alone_are_sent() -> None:
    class Sent(Counted, Adapted):
        pass

    Counted.sent = []
    frozen = flat(Net())
    for whole in on_ranks(lambda: fitted(Sent(), "diloco", "parameters.0.every=1")):
        assert torch.equal(whole[: frozen.numel()], frozen)
    assert 8 * 4 <= Counted.sent[0] < 36 * 4 < frozen.numel() * 4


class Gan(lightning.LightningModule):
    """Two networks with an optimizer each, trained in turn."""

    def __init__(self, *, toggles: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(5, 5), nn.Linear(5, 1)
        self.toggles = toggles

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        for number, optimizer in enumerate(self.optimizers()):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.losses(real, number))
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def losses(self, real: Tensor, number: int) -> Tensor:
        made = self.generator(real)
        if number == 0:
            loss: Tensor = -self.critic(made).mean()
        else:
            loss = (self.critic(made.detach()) ** 2 - self.critic(real)).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), 0.05) for each in (self.generator, self.critic)]


@pytest.mark.parametrize("toggles", [False, True])
def test_several_optimizers_step_as_on_one_rank_with_all_samples(toggles: bool) -> None:
    def one_rank() -> Tensor:
        gan = Gan()
        optimizers = gan.configure_optimizers()
        for number in [0, 1] * 5:
            gan.zero_grad()
            gan.losses(samples(2 * BATCH)[:][0], number).backward()
            optimizers[number].step()
        return flat(gan)

    given = DataLoader(samples(2 * BATCH), BATCH)  # a step an epoch
    one, other = on_ranks(lambda: fitted(Gan(toggles=toggles), "sgd", data=given, max_epochs=5))
    assert torch.equal(one, other)
    torch.testing.assert_close(one, one_rank())


def test_parameters_that_a_batch_leaves_unused_stay() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    one, other = on_ranks(lambda: fitted(Unused(), "sgd"))
    assert torch.equal(one, other)
    assert torch.equal(one[-6:], flat(Unused())[-6:])


def test_a_data_module_and_a_sampler_are_shared_out() -> None:
    class Data(lightning.LightningDataModule):
        def prepare_data(self) -> None:
            prepared.append(hocket.join().rank)

        def train_dataloader(self) -> Any:
            sampler = WeightedRandomSampler([1.0] * 48, 48, generator=torch.Generator().manual_seed(3))
            return DataLoader(samples(), BATCH, sampler=sampler)

    class Seen(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch[0].clone())
            return super().training_step(batch, batch_idx)

    prepared: list[int] = []
    seen: list[Tensor] = []
    on_ranks(lambda: fitted(Seen(), "sgd", data=Data(), max_epochs=1))
    assert prepared == [0]
    drawn = list(WeightedRandomSampler([1.0] * 48, 48, generator=torch.Generator().manual_seed(3)))
    expected = samples()[drawn][0]
    assert sorted(torch.cat(seen).tolist()) == sorted(expected.tolist())


def test_a_stream_ends_on_all_ranks_with_the_shortest() -> None:
    def share() -> Any:
        rank = hocket.join().rank
        return iter([samples()[k] for k in range(rank, 40 if rank else 24, 2)])

    counts = on_ranks(lambda: _steps(DataLoader(Stream(share), BATCH)))
    assert counts == [3, 3]


def _steps(data: Any) -> int:
    one = trainer("sgd", max_epochs=1)
    one.fit(Net(), data)
    return one.global_step


def test_ranks_with_the_same_samples_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    everything = DataLoader(Stream(lambda: iter([samples()[k] for k in range(8)])), BATCH)
    with caplog.at_level(logging.WARNING, "hocket"):
        on_ranks(lambda: fitted(Net(), "sgd", data=everything, max_epochs=1))
        on_ranks(lambda: fitted(Net(), "sgd", max_epochs=1))
    assert [each.message.split(":")[0] for each in caplog.records] == [
        "all 2 ranks train on the same batches"
    ]


def test_a_loader_of_hocket_s_gives_the_samples_of_a_session() -> None:
    def by_trainer() -> Tensor:
        return fitted(
            Net(), "sgd", data=hocket.loader(samples(), BATCH, seed=5), use_distributed_sampler=False
        )

    def by_session() -> Tensor:
        net, loader = Net(), hocket.loader(samples(), BATCH, seed=5)
        optimizer = net.configure_optimizers()
        with hocket.attach(net, optimizer, "sgd") as session:
            for batch in itertools.chain(session.data(loader), session.data(loader)):
                optimizer.zero_grad()
                net.loss(batch).backward()
                optimizer.step()
        return flat(net)

    assert torch.equal(on_ranks(by_trainer)[1], on_ranks(by_session)[1])


CLI_CONFIG = """
trainer:
  strategy:
    class_path: hocket_lightning.trainer.TrainerStrategy
    init_args: {{strategy: {0}/own.yaml}}
  accelerator: cpu
  max_epochs: 2
  default_root_dir: {0}
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
"""


class Samples(lightning.LightningDataModule):
    """The samples that `looped` trains on."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), BATCH, shuffle=True)


@pytest.mark.full
@pytest.mark.skipif(find_spec("jsonargparse") is None, reason="jsonargparse is not installed")
def test_a_command_line_of_lightning_s(tmp_path: Path) -> None:
    (tmp_path / "given.yaml").write_text(CLI_CONFIG.format(tmp_path))  # Lightning writes config.yaml
    (tmp_path / "own.yaml").write_text(
        "recipe: periodic_average\nstrategy: {parameters: [{collective: allreduce, every: 4}]}\n"
    )
    words = ["fit", "--config", str(tmp_path / "given.yaml")]

    def trained() -> Tensor:
        return flat(LightningCLI(Net, Samples, seed_everything_default=False, args=words).model)

    by_loop = on_ranks(lambda: looped(Net(), "periodic_average", "parameters.0.every=4"))
    for one, other in zip(on_ranks(trained), by_loop, strict=True):
        assert torch.equal(one, other)
    assert "TrainerStrategy" in (tmp_path / "config.yaml").read_text()
