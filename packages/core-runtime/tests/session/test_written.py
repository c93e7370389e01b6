"""Writes by users: gradients by hand, masks and clipped weights after a step, parameters that are set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import batches, flat, gradient_of, mlp, on_ranks, sgd

import hocket
from hocket.errors import AttachError, DisagreementError, ReplacedError
from hocket.session.save.replica_state import ReplicaState
from hocket.session.save.saved_model import open_checkpoint
from hocket.transport.peer import gather

FORWARD = ("dpsgd", "parameters.0.overlap=forward")


@pytest.mark.one_of_each
@pytest.mark.parametrize("strategy", ["sgd", "agd", "hierarchical_sgd"])
@pytest.mark.parametrize("way", ["by hand", "accumulated", "one rank has none"])
def test_gradients_that_no_backward_sends(strategy: str, way: str) -> None:
    def run(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            for x, y in batches(rank, 3):
                optimizer.zero_grad()
                if way == "accumulated":
                    with session.accumulate():
                        F.cross_entropy(model(x), y).backward()
                elif way == "by hand" or rank == 0:
                    for p, gradient in zip(model.parameters(), gradient_of(model, (x, y)), strict=True):
                        p.grad = gradient
                optimizer.step()
        return flat(model)

    model = mlp()
    optimizer = sgd(model)
    for one, other in zip(batches(0, 3), batches(1, 3), strict=True):
        both = [gradient_of(model, one), gradient_of(model, other)]
        for p, a, b in zip(model.parameters(), *both, strict=True):
            p.grad = (a + b if way != "one rank has none" else a) / 2
        optimizer.step()
    for values in on_ranks(2, run):
        assert torch.allclose(values, flat(model), rtol=0, atol=1e-14)


MASK = torch.arange(35).reshape(7, 5) % 2


def mask(model: nn.Module) -> None:
    model.get_parameter("0.weight").data.mul_(MASK)


def clip(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)


@pytest.mark.one_of_each
@pytest.mark.parametrize("write", [mask, clip])
@pytest.mark.parametrize(
    "strategy", [("sgd",), ("agd",), ("dpsgd",), FORWARD, ("sgp",), ("overlap_sgp",)], ids=" ".join
)
def test_what_is_written_after_a_step_stays(
    strategy: tuple[str, ...], write: Callable[[nn.Module], None]
) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer = sgd(model)
        seen: list[Tensor] = []
        write(model)
        with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
            hook = model.register_forward_pre_hook(lambda *_: seen.append(flat(model)))
            for x, y in session.data(batches(rank, 5)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                write(model)
            hook.remove()
            session.settle()
            if strategy != ("overlap_sgp",):  # what others have sent before they wrote is still to come
                seen.append(flat(model))
        return torch.stack(seen), flat(model)

    told = on_ranks(2, run)
    for seen, _ in told:
        if write is mask:
            assert (seen[:, :35] * (1 - MASK.reshape(-1)) == 0).all()
        else:
            assert seen.abs().max() <= 0.3
    if strategy == FORWARD:
        # Two ranks mix to their mean: as one process does it with two replicas, which are mixed once they are written.
        models = [mlp() for _ in range(2)]
        optimizers = [sgd(model) for model in models]
        for model in models:
            write(model)
        for step in range(5):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                x, y = batches(rank, 5)[step]
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                write(model)
            mean = (flat(models[0]) + flat(models[1])) / 2
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        for _, values in told:
            assert torch.allclose(values, flat(models[0]), rtol=0, atol=1e-14)


def test_a_forward_of_one_rank_alone_waits_for_nobody() -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, hocket.compose(*FORWARD)) as session:
            for x, y in session.data(batches(rank, 3)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if rank == 0:
                    with torch.no_grad():
                        model(x)
                    model.state_dict()
                gather(session.peer, "a barrier")

    on_ranks(2, run)


@pytest.mark.parametrize("strategy", [("dpsgd",), FORWARD, ("periodic_average",)], ids=" ".join)
def test_parameters_that_are_set_are_what_is_sent_and_averaged(strategy: tuple[str, ...]) -> None:
    def run(rank: int) -> Tensor:
        model = mlp()
        with hocket.attach(model, sgd(model), hocket.compose(*strategy), initial="keep") as session:
            nn.utils.vector_to_parameters(
                torch.full((flat(model).numel(),), rank + 1.0, dtype=torch.float64), model.parameters()
            )
            session.consensus()
            return flat(model)

    for values in on_ranks(2, run):
        assert (values == 1.5).all()


def freeze(model: nn.Module) -> None:
    model.get_submodule("0").requires_grad_(False)


@pytest.mark.parametrize("strategy", ["sgd", "agd", "dpsgd", "local"])
def test_a_layer_frozen_later(strategy: str) -> None:
    """Also with data that end within an accumulation."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.get_parameter("0.weight").detach().clone()
        with hocket.attach(model, optimizer, strategy) as session:
            freeze(model)
            for number, (x, y) in enumerate(session.data(batches(rank, 3 + rank))):
                if number % 2 == 0:
                    optimizer.zero_grad()
                    with session.accumulate():
                        F.cross_entropy(model(x), y).backward()
                else:
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            session.settle()
        return before, model.get_parameter("0.weight").detach().clone()

    for before, after in on_ranks(2, run):
        assert torch.equal(before, after)


def share(model: nn.Module) -> None:
    model.share_memory()


def add(model: nn.Module) -> None:
    model.add_module("more", nn.Linear(3, 3))


def register(model: nn.Module) -> None:
    model.get_submodule("0").register_parameter("more", nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("strategy", ["sgd", "dpsgd", "local"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (share, "memory was moved after attach .*hand a copy to that process"),
        (add, "module more was added after attach"),
        (register, r"parameter 0\.more was added after attach"),
    ],
)
def test_changes_that_are_refused(strategy: str, change: Callable[[nn.Module], None], message: str) -> None:
    def run(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, strategy) as session:
            for number, (x, y) in enumerate(session.data(batches(rank, 3))):
                if number == 1:
                    change(model)
                optimizer.zero_grad()
                F.cross_entropy(model[2](torch.tanh(model[0](x))), y).backward()
                optimizer.step()

    with pytest.raises(ReplacedError, match=message):
        on_ranks(2, run)


@pytest.mark.parametrize("shares", [False, True])
def test_a_model_in_shared_memory_is_warned_of_once(shares: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Another process that holds it keeps the values from before attach."""

    def run(rank: int) -> tuple[bool, bool]:
        model = mlp()
        if shares:
            share(model)
        [held, *_] = [p.detach() for p in model.parameters()]
        before = held.clone()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, "sgd") as session:
            for x, y in session.data(batches(rank, 2)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return torch.equal(held, before), torch.equal(held, next(model.parameters()))

    assert on_ranks(2, run) == [(True, False)] * 2
    lines = [each for each in caplog.messages if "in shared memory (0.weight" in each]
    assert len(lines) == shares


class Aliased(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        if kind == "parameter":
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = nn.Parameter(self.a.weight)
        else:
            self.register_buffer("b", self.a.weight.data[1:3])


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_memory_that_is_shared_without_being_one_tensor(kind: str) -> None:
    model: Any = Aliased(kind)
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1)
    with pytest.raises(
        AttachError, match=r"a\.weight and b(\.weight)? share memory .*make them one parameter"
    ):
        hocket.virtual(1).run(lambda: hocket.attach(model, optimizer, "sgd"))


def test_the_same_parameters_in_another_order() -> None:
    def run(rank: int) -> None:
        names = ("left", "right") if rank else ("right", "left")
        model = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
        hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd")

    with pytest.raises(DisagreementError, match=r"parameters in order\.0"):
        on_ranks(2, run)


ODD_BUFFERS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "conjugated": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD_BUFFERS)
def test_buffers_that_cannot_be_sent(kind: str) -> None:
    model = mlp()
    model.register_buffer("odd", ODD_BUFFERS[kind]())
    with pytest.raises(AttachError, match=f"buffer odd is .*{kind}.* cannot be sent"):
        hocket.virtual(1).run(lambda: hocket.attach(model, sgd(model), "sgd"))


def test_sparse_gradients_of_a_plain_parameter() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6, 2))

        def forward(self, index: Tensor) -> Tensor:
            return F.embedding(index, self.w, sparse=True)

    def run(rank: int) -> Tensor:
        model = Embeds()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with hocket.attach(model, optimizer, "sgd"):
            model(torch.tensor([rank, rank, 5])).sum().backward()
            optimizer.step()
        return model.w.detach().clone()

    for values in on_ranks(2, run):
        assert values[:, 0].tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, -1.0]


OUTER = {"every": 2, "collective": "allreduce", "outer": {"name": "sgd", "lr": 0.7, "momentum": 0.9}}
LATE_OUTER = {
    **OUTER,
    "every": 4,
    "stagger": True,
    "segments": "layers",
    "delay": 1,
    "merge": {"name": "blend", "local": 0.5},
}
#: With exchanges under way at the end, and with outer parameters.
LATE: dict[str, tuple[Any, ...]] = {
    "sgd": ("sgd",),
    "dpsgd": ("dpsgd",),
    "overlap_sgp": ("overlap_sgp",),
    "later": ("overlap_sgp", "parameters.0.every=3", "parameters.0.delay=2"),
    "outer": ({"parameters": [OUTER]},),
    "outer later": ({"parameters": [LATE_OUTER]},),
}


def load(model: nn.Module, values: dict[str, Tensor]) -> None:
    model.load_state_dict(values)


def set_data(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = values[name].clone()


@pytest.mark.parametrize("strategy", LATE)
@pytest.mark.parametrize("write", [load, set_data])
def test_the_best_weights_that_are_loaded_are_what_is_read_and_closed(
    strategy: str, write: Callable[[nn.Module, dict[str, Tensor]], None]
) -> None:
    """What is under way is not merged into them, and outer parameters do not take their place."""

    def run(rank: int, read: str) -> bool:
        model = mlp()
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, hocket.compose(*LATE[strategy]))
        for number, (x, y) in enumerate(batches(rank, 5)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number == 2:
                with session.consensus():
                    best = {name: value.clone() for name, value in model.state_dict().items()}

        def is_best() -> bool:
            return all(torch.equal(value, best[name]) for name, value in model.state_dict().items())

        write(model, best)
        if read == "consensus":
            with session.consensus():
                assert is_best()
        elif read == "consensus for good":
            session.consensus()
            assert is_best()
        elif read == "replica":
            with session.replica():
                assert is_best()
        elif read == "distance":
            assert session.consensus_distance() == 0.0
        session.close()
        return is_best()

    for read in ("nothing", "consensus", "consensus for good", "replica", "distance"):
        assert on_ranks(2, partial(run, read=read)) == [True, True], read


@pytest.mark.parametrize("strategy", [*LATE][1:])
def test_weights_that_are_put_back_train_as_if_nothing_had_been_written(strategy: str) -> None:
    """As a moving average's, which an evaluation swaps in and out, to the bit."""

    def run(rank: int, *, swaps: bool) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        seen = []
        with hocket.attach(model, optimizer, hocket.compose(*LATE[strategy])) as session:
            for x, y in batches(rank, 9):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if swaps:
                    own = {name: value.clone() for name, value in model.state_dict().items()}
                    model.load_state_dict({name: rank + 0 * value for name, value in own.items()})
                    with session.consensus():
                        assert (flat(model) == 0.5).all()
                    model.load_state_dict(own)
                with session.consensus():
                    seen.append(flat(model))
                with session.replica():
                    seen.append(flat(model))
        return torch.cat([*seen, flat(model)])

    before, after = (on_ranks(2, partial(run, swaps=swaps)) for swaps in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_weights_that_one_rank_alone_loads_drop_what_is_under_way_on_all() -> None:
    """Else half of a displacement would be lost, and the ranks' mean with it."""

    def run(rank: int, *, loads: bool) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        session = hocket.attach(model, optimizer, "overlap_sgp")
        for x, y in batches(rank, 5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        before = flat(model)
        if loads and rank == 0:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        session.close()
        return flat(model) - before

    assert all(moved.any() for moved in on_ranks(2, lambda rank: run(rank, loads=False)))
    first, second = on_ranks(2, lambda rank: run(rank, loads=True))
    assert torch.allclose(first, torch.ones_like(first), rtol=0, atol=1e-12)
    assert not second.any()


@pytest.mark.filterwarnings("ignore:.*is of .* ranks")
@pytest.mark.parametrize("strategy", LATE)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_best_weights_that_are_loaded_and_saved_are_what_a_resumed_run_and_an_export_have(
    strategy: str, ranks: int, tmp_path: Path
) -> None:
    def save(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        with hocket.attach(model, optimizer, hocket.compose(*LATE[strategy])) as session:
            for x, y in batches(rank, 5):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            load(model, {name: rank + 0 * value for name, value in model.state_dict().items()})
            session.save(tmp_path)

    def resume(rank: int) -> Tensor:
        model = mlp()
        with hocket.attach(model, sgd(model), hocket.compose(*LATE[strategy])) as session:
            session.load(tmp_path)
            session.consensus()
            return flat(model)

    on_ranks(2, save)
    assert all((values == 0.5).all() for values in on_ranks(ranks, resume))
    [checkpoint] = [path for path in tmp_path.iterdir() if path.is_dir()]
    with open_checkpoint(checkpoint) as saved:
        assert all((saved.tensors.value(name) == 0.5).all() for name in saved.tensors.forms)


def test_a_checkpoint_of_an_earlier_version_does_not_say_whether_weights_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rank: int, *, loads: bool) -> None:
        model = mlp()
        with hocket.attach(model, sgd(model), hocket.compose(*LATE["outer"])) as session:
            if loads:
                session.load(tmp_path)
            else:
                session.save(tmp_path)

    state_dict = ReplicaState.state_dict

    def earlier(state: ReplicaState) -> Any:
        sections = state_dict(state)
        del sections["modules"]["written"]
        return sections

    with monkeypatch.context() as patch:
        patch.setattr(ReplicaState, "state_dict", earlier)
        on_ranks(2, partial(run, loads=False))
    on_ranks(2, partial(run, loads=True))
    [checkpoint] = [path for path in tmp_path.iterdir() if path.is_dir()]
    with open_checkpoint(checkpoint) as saved:
        assert all(saved.tensors.value(name) is not None for name in saved.tensors.forms)
