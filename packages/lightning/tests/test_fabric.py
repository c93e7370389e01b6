"""A Fabric script's weights are those of a plain loop over a session, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from nets import BATCH, Net, flat, looped, on_ranks, samples
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hocket.errors import UserError
from hocket_lightning.fabric import HocketStrategy


def begun(*strategy: str) -> Any:
    fabric = Fabric(accelerator="cpu", strategy=HocketStrategy(*strategy))
    fabric.launch()
    return fabric


def by_fabric(fabric: Any, accumulate: int = 1, clip: float | None = None) -> Tensor:
    net = Net()
    model, optimizer = fabric.setup(net.net, torch.optim.SGD(net.net.parameters(), 0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(samples(), BATCH, shuffle=True))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            adds = bool((number + 1) % accumulate)
            with fabric.no_backward_sync(model, enabled=adds):
                fabric.backward(F.cross_entropy(model(x), y) / accumulate)
            if adds:
                continue
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
    fabric.strategy.session.consensus()
    fabric.strategy.session.close()
    return flat(net)


@pytest.mark.parametrize("strategy", [("sgd",), ("diloco", "parameters.0.every=6")], ids=lambda each: each[0])
def test_the_weights_are_those_of_a_plain_loop(strategy: tuple[str, ...]) -> None:
    assert torch.equal(
        on_ranks(lambda: by_fabric(begun(*strategy)))[1], on_ranks(lambda: looped(Net(), *strategy))[1]
    )


def test_accumulation_and_clipping_are_those_of_a_plain_loop() -> None:
    one = on_ranks(lambda: by_fabric(begun("sgd"), accumulate=2, clip=0.05))
    assert torch.equal(one[0], on_ranks(lambda: looped(Net(), "sgd", accumulate=2, clip=0.05))[0])


def test_saved_models_are_the_mean(tmp_path: Path) -> None:
    def rank() -> Tensor:
        fabric = begun("periodic_average", "parameters.0.every=100")
        model, optimizer = fabric.setup(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), 0.1))
        fabric.backward(model(torch.ones(1, 2) * (fabric.global_rank + 1)).sum())
        optimizer.step()
        fabric.save(tmp_path / "model.pt", {"model": model})
        with fabric.strategy.session.consensus():
            fabric.save(tmp_path / "same.pt", {"model": model})
        return flat(net)

    torch.manual_seed(0)
    one, other = on_ranks(rank)
    saved = torch.cat(
        [each.reshape(-1) for each in torch.load(tmp_path / "model.pt", weights_only=True)["model"].values()]
    )
    assert not torch.equal(one, other)
    torch.testing.assert_close(saved, (one + other) / 2)


def test_each_of_two_models_is_saved_as_its_own_mean(tmp_path: Path) -> None:
    def rank() -> list[Tensor]:
        fabric = begun("periodic_average", "parameters.0.every=100")
        nets = [nn.Linear(2, 1, bias=False) for _ in range(2)]
        made = [fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1)) for net in nets]
        for model, optimizer in made:
            fabric.backward(model(torch.ones(1, 2) * (fabric.global_rank + 1)).sum())
            optimizer.step()
        fabric.save(tmp_path / "both.pt", {str(n): model for n, (model, _) in enumerate(made)})
        return [flat(net) for net in nets]

    one, other = on_ranks(rank)
    saved = torch.load(tmp_path / "both.pt", weights_only=True)
    for number in (0, 1):
        assert not torch.equal(one[number], other[number])
        torch.testing.assert_close(saved[str(number)]["weight"][0], (one[number] + other[number]) / 2)


def test_backwards_of_the_first_of_two_models_add_up() -> None:
    def sent(adds: bool) -> int:
        fabric = begun("sgd")
        net = nn.Linear(2, 1)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
        session = fabric.strategy.session
        fabric.setup(other := nn.Linear(2, 1), torch.optim.SGD(other.parameters(), 0.1))
        with fabric.no_backward_sync(model, enabled=adds):
            fabric.backward(model(torch.ones(1, 2)).sum())
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        return int(session.counters.bytes_sent)

    [added, _], [apart, _] = on_ranks(lambda: sent(True)), on_ranks(lambda: sent(False))
    assert 0 < added < apart


def test_collectives_go_over_all_ranks() -> None:
    def rank() -> None:
        fabric = begun("sgd")
        mine = torch.tensor(float(fabric.global_rank))
        assert fabric.broadcast(fabric.global_rank, src=1) == 1
        assert fabric.all_reduce(mine, reduce_op="sum") == 1
        assert fabric.all_reduce(mine) == 0.5
        assert fabric.all_gather(mine).tolist() == [0, 1]
        fabric.barrier()

    on_ranks(rank)


def test_an_optimizer_without_its_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"fabric.setup\(model, optimizer\)"):
        begun("sgd").setup_optimizers(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))


def test_devices_have_to_be_the_ranks() -> None:
    with pytest.raises(UserError, match="ask for 2 ranks, but HocketStrategy does not start ranks"):
        Fabric(accelerator="cpu", devices=2, strategy=HocketStrategy("sgd"))
