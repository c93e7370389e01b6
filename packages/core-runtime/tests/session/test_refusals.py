"""A session refuses by name what it cannot carry, before anything is touched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # which torch exports
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # the backend `fake`
from toys import mlp, on_ranks, sgd

import hocket
from hocket.errors import AttachError
from hocket.session.torch_internals import is_nested_backward


def attach(model: Any, optimizer: Any = None) -> None:
    """Attach on a single rank, with an optimizer over the model's parameters if no other is given."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.attach(model, optimizer, "sgd").close()


def refused(message: str, model: Any, optimizer: Any = None) -> None:
    before = [(p, p.data_ptr()) for p in model.parameters()] if type(model) is nn.Module else []
    with pytest.raises(AttachError, match=message):
        attach(model, optimizer)
    assert all(p.data_ptr() == address for p, address in before)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    # No Gloo: torch keeps a group that DTensors have used, and frees it in the child when another thread forks, where
    # Gloo then joins threads that are not there and crashes. So `num_workers` of tests after these would fail.
    distributed.init_process_group("fake", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(mlp())
    refused(
        r"^the model is wrapped in DistributedDataParallel.*attach the plain model, and call the plain model",
        wrapped,
    )
    refused("^module '0' is wrapped in DistributedDataParallel", nn.Sequential(wrapped))
    # Afterwards, too, and no longer once the session is closed.
    model = mlp()
    with hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd"):
        for outer in (model, nn.Sequential(model)):
            with pytest.raises(
                AttachError, match="DistributedDataParallel was given a model that is in a session"
            ):
                DistributedDataParallel(outer)
    DistributedDataParallel(model)


def test_data_parallel() -> None:
    """Over several devices it is refused; over none, as on a CPU, it only calls the model."""
    wrapped = nn.DataParallel(mlp())
    wrapped.device_ids = [0, 1]
    refused("^the model is wrapped in DataParallel over 2 devices.*start a rank for each device", wrapped)
    wrapped.device_ids = []
    with hocket.attach(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), "sgd"):
        pass


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
def test_fsdp() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    refused("^the model is sharded by FullyShardedDataParallel.*shard with torch.*fully_shard", wrapped)


@pytest.mark.usefixtures("process_group")
def test_fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    attach(model)  # an island of one rank
    refused = "is given, but no parameter of the model is sharded: leave"
    with pytest.raises(AttachError, match=f"island {refused} island out"):
        hocket.attach(mlp(), sgd(mlp()), "sgd", island=init_device_mesh("cpu", (1,)))
    with pytest.raises(AttachError, match=f"same_samples {refused} same_samples out"):
        hocket.attach(mlp(), sgd(mlp()), "sgd", same_samples=["tp"])


@pytest.mark.usefixtures("process_group")
def test_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = mlp()
    mesh = init_device_mesh("cpu", (1,))
    model[0].weight = nn.Parameter(distribute_tensor(model.get_parameter("0.weight").detach(), mesh))
    attach(model)


def test_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    refused("^parameter 0.weight is lazy and has no shape yet: run one forward", model)
    model(torch.zeros(1, 2))
    attach(model)


def test_meta() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    refused(
        r"^parameter 1.weight is on the meta device and holds no values: materialise it \(to_empty\)", model
    )


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embedding(kind: Callable[..., nn.Module]) -> None:
    refused(
        "^module '0' is an embedding with sparse gradients.*sparse=False",
        nn.Sequential(kind(4, 2, sparse=True)),
    )
    attach(nn.Sequential(kind(4, 2)))


def test_sparse_parameter() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    refused("^parameter weight has layout torch.sparse_coo: only strided", model)


def test_compiled() -> None:
    refused(
        "^the model is already compiled.*attach the plain model first, then torch.compile it",
        torch.compile(mlp(), backend="eager"),
    )
    inside = mlp()
    inside[0].compile(backend="eager")
    refused("^module '0' is already compiled", inside)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.ones(2, 2, dtype=torch.complex64),
            r"is torch\.complex64: .*float64 can be exchanged \(keep a complex one",
        ),
        (
            torch.ones(1).expand(4),
            r"has overlapping or scattered elements \(expanded or sliced\?\): make it contiguous",
        ),
        (torch.ones(4, 4)[:, :2], r"has overlapping or scattered elements"),
        (torch.ones(8)[::2], r"has overlapping or scattered elements"),
        (torch.ones(4, dtype=torch.float8_e5m2), r"is torch\.float8_e5m2: only float16, bfloat16"),
    ],
)
def test_parameter(value: torch.Tensor, message: str) -> None:
    model = mlp()
    model.odd = nn.Parameter(value)
    refused(f"^parameter odd {message}", model)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(()),
        torch.ones(0),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(2, 1, 3).expand(2, 1, 3),
        torch.ones(6, 4)[2:4],
        torch.ones(1, 4).as_strided((1, 4), (7, 1)),
    ],
)
def test_parameters_that_only_look_odd(value: torch.Tensor) -> None:
    model = nn.Module()
    model.odd = nn.Parameter(value.clone(memory_format=torch.preserve_format) if value.dim() else value)
    attach(model)
    torch.testing.assert_close(model.odd.detach(), value)
    assert model.odd.stride() == value.stride() or value.numel() <= 4


def test_frozen_parameters_of_any_kind() -> None:
    model = mlp()
    model.quantised = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    model.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    attach(model)


def test_optimizer_over_other_parameters() -> None:
    model, other = mlp(), nn.Linear(4, 9)
    refused(
        r"^the optimizer's parameter 0 of group 1 \(shape \(9, 4\)\) is not in the model.*stay on this rank",
        model,
        torch.optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}], lr=0.1),
    )
    other.requires_grad_(False)
    refused(
        "^the optimizer holds none of the model's parameters",
        model,
        torch.optim.SGD(other.parameters(), lr=0.1),
    )


def test_optimizer_over_some_of_the_parameters() -> None:
    model = mlp()
    attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_wrong_types() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused("^attach takes a torch.nn.Module, not list", [model], optimizer)
    refused("^attach takes a torch.optim.Optimizer, not OneCycleLR", model, _schedule(optimizer))


def _schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)


class Checkpointed(nn.Module):
    """Two layers, the first of which is computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        y: torch.Tensor = self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))
        return y


@pytest.mark.parametrize("strategy", ["sgd", "agd"])
def test_reentrant_checkpoint(strategy: str) -> None:
    def run(rank: int) -> None:
        model = Checkpointed(reentrant=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 5, requires_grad=True)
        with (
            pytest.raises(AttachError, match=r"a backward ran inside another one.*use_reentrant=False"),
            hocket.attach(model, optimizer, strategy),
        ):
            model(x).sum().backward()

    on_ranks(2, run)


class Deferred(torch.autograd.Function):
    """Calls what it is given from the backward of a node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return (*gradients, None)


def deferred(call: Callable[[], object]) -> torch.Tensor:
    """Return what calls `call` in its backward."""
    result: torch.Tensor = Deferred.apply(torch.ones(1, requires_grad=True), call)  # type: ignore[no-untyped-call]
    return result


def hook_sees(call: Any) -> bool:
    """Return whether a hook finds the backward nested that `call` makes of a tensor with that hook."""
    seen: list[bool] = []
    inner = torch.ones(1, requires_grad=True)
    inner.register_post_accumulate_grad_hook(lambda _: seen.append(is_nested_backward()))
    call(inner)
    [nested] = seen
    return nested


def backward_of(inner: torch.Tensor) -> None:
    with torch.enable_grad():  # which a node's backward turns off
        (2 * inner).sum().backward()


def test_a_nested_backward_is_known_by_who_called_it_on_any_thread() -> None:
    def in_node(inner: torch.Tensor) -> None:
        deferred(lambda: backward_of(inner)).sum().backward()

    def in_hook(inner: torch.Tensor) -> None:
        outer = torch.ones(1, requires_grad=True)
        outer.register_hook(lambda _: backward_of(inner))
        outer.sum().backward()

    def on_a_devices_thread(inner: torch.Tensor) -> None:
        """There the stack begins with the node: nothing of who called the outer backward is on it."""
        node = deferred(lambda: backward_of(inner)).grad_fn
        assert node is not None
        thread = threading.Thread(target=lambda: node.apply(torch.ones(1)))  # type: ignore[attr-defined]  # of Python's nodes
        thread.start()
        thread.join()

    assert not hook_sees(backward_of)
    for nested in (in_node, in_hook, on_a_devices_thread):
        assert hook_sees(nested)


def test_other_checkpoint_is_carried() -> None:
    def run(rank: int) -> torch.Tensor:
        model = Checkpointed(reentrant=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, "agd"):
            model(torch.full((2, 5), float(rank))).sum().backward()
        assert model.body.weight.grad is not None
        return model.body.weight.grad

    model = Checkpointed(reentrant=False)
    model(torch.full((2, 5), 0.5)).sum().backward()
    for gradient in on_ranks(2, run):
        torch.testing.assert_close(gradient, model.body.weight.grad)


def test_a_buffer_whose_elements_share_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("table", torch.zeros(1).expand(4))
    with pytest.raises(AttachError, match="buffer table has overlapping or scattered elements"):
        hocket.attach(model, torch.optim.SGD(model.parameters(), 0.1), "sgd")


def test_a_compressor_that_takes_over_momentum_needs_torchs_sgd() -> None:
    corrected = {
        "name": "momentum_correction",
        "compressor": {"name": "error_feedback", "compressor": "topk"},
    }
    exchange = {"collective": "sparse_allreduce", "compressor": corrected}

    def run(rank: int) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(AttachError, match=r"momentum of torch\.optim\.SGD, not that of AdamW"):
            hocket.attach(model, torch.optim.AdamW(model.parameters()), {"gradients": [exchange]})

    on_ranks(2, run)
